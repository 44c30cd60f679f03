// The list of documents: those of the server, and files that are on their way there.

const isBusy = (item) => item.state === "queued" || item.state === "prefilling";

// ---- how fast one is read, and what is left: by what was seen of it in the last half minute

const SEEN_S = 30;
const seen = new Map();  // by name: [when, how much of it was read], oldest first

function heard(item) {
  state.documents.set(item.name, item);
  if (item.state !== "prefilling") {
    seen.delete(item.name);
    return;
  }
  const now = performance.now() / 1000, list = seen.get(item.name) || [];
  list.push([now, item.progress]);
  while (list.length > 2 && now - list[0][0] > SEEN_S) list.shift();
  seen.set(item.name, list);
}

function speedOf(item) {
  const list = seen.get(item.name) || [];
  if (list.length < 2) return "";
  const [from, to] = [list[0], list[list.length - 1]];
  const share = (to[1] - from[1]) / (to[0] - from[0]);
  if (!(share > 0) || !Number.isFinite(share)) return "";
  return ", " + number(share * item.tokens) + " tokens/s, " + timeOf((1 - item.progress) / share) + " left";
}

function timeOf(seconds) {
  if (seconds < 60) return "about " + number(Math.max(1, seconds)) + " s";
  if (seconds < 5400) return "about " + number(seconds / 60) + " min";
  return "about " + number(seconds / 3600, 1) + " h";
}

// ---- rows. One stays the same element for as long as its document is there: who clicks at one meets it, however often it changes.

function about(item) {
  switch (item.state) {
    case "none": return "the model answers by itself";
    case "waiting": return item.message || "waits here until the server has room";
    case "sending": return "is sent, " + size(item.file.size);
    case "refused": case "taken": case "same": return item.message;
    case "queued": return number(item.tokens) + " tokens, waits to be read";
    case "prefilling": return number(item.tokens) + " tokens, " + number(100 * item.progress) + "% read" + speedOf(item);
    case "failed": return item.error ? item.error.message : "failed";
  }
  return number(item.tokens) + " tokens, " + size(item.bytes) + (item.usable ? "" : ", of another model");
}

function button(className, text, act) {
  const made = element("button", className, text);
  made.type = "button";
  made.addEventListener("click", act);
  return made;
}

const rows = new Map();
function rowOf(name) {
  const row = {item: null, element: element("li"), about: element("span", "about"), progress: element("progress")};
  row.name = element("span", "name");
  row.pick = button("pick", undefined, () => { choose(row.item.name); fold(true); byId("question").focus(); });
  row.pick.append(row.name, row.about);
  row.remove = button("remove", "", () => { if (row.item.file) forget(row.item); else removeDocument(row.item); });
  row.again = button("again", "Try again", () => retry(row.item));
  row.replace = button("replace", "Replace it", () => replace(row.item));
  row.rename = element("form", "rename");
  row.other = element("input", "other");
  row.other.setAttribute("aria-label", "Another name for " + name);
  row.rename.hidden = true;
  row.rename.append(row.other, element("button", "", "Use this name"));
  row.rename.addEventListener("submit", (event) => {
    event.preventDefault();
    rename(row.item, row.other.value.trim());
  });
  row.ways = element("div", "ways");
  row.ways.append(row.again, row.rename, row.replace);
  row.progress.max = 1;
  row.progress.setAttribute("aria-label", "How much of " + name + " is read");
  row.element.append(row.pick, row.remove, row.progress, row.ways);
  return row;
}

// A file that was refused, or a document that failed and came from here.
function retry(item) {
  if (item.file) return tryAgain(item);
  addFiles([{file: files.get(item.name), path: item.name}]);
}

function showRow(row, item) {
  const ours = item.file !== undefined, ended = ["failed", "refused", "taken"].includes(item.state);
  row.item = item;
  row.element.dataset.name = item.name;
  row.element.dataset.state = item.state;
  row.pick.dataset.focus = "pick " + item.name;
  row.name.textContent = item.state === "none" ? "No document" : ours ? item.path : item.name;
  row.element.classList.toggle("chosen", !ours && item.name === (state.chosen || ""));
  row.about.className = ended ? "about error" : "about quiet";
  row.about.textContent = about(item);
  row.pick.disabled = ours || ended || item.usable === false;
  row.pick.setAttribute("aria-pressed", String(!ours && item.name === (state.chosen || "")));
  row.remove.hidden = item.state === "none" || (!ours && !can("delete"));
  row.remove.textContent = ours || item.state === "failed" ? "Remove" : isBusy(item) ? "Cancel" : "Delete";
  row.remove.setAttribute("aria-label", row.remove.textContent + " " + item.name);
  row.again.hidden = !(item.state === "refused" || (item.state === "failed" && files.has(item.name) && can("import")));
  row.replace.hidden = item.state !== "taken" || !can("delete");
  if (item.state === "taken" && row.rename.hidden) row.other.value = freeName(item.name);
  row.rename.hidden = item.state !== "taken";
  row.progress.hidden = item.state !== "prefilling" && item.state !== "sending";
  if (item.state === "prefilling") row.progress.value = item.progress; else row.progress.removeAttribute("value");
}

// By name, files beside the document whose name they want; first what is no document.
const inOrder = new Intl.Collator("en", {numeric: true});
function itemsInOrder() {
  const items = [...state.documents.values()].map((item) => ["d" + item.name, item]);
  for (const upload of state.uploads.values()) items.push(["u" + upload.id, upload]);
  items.sort(([a, one], [b, other]) => inOrder.compare(one.name, other.name) || (a < b ? -1 : 1));
  if (items.length > 0) items.unshift(["none", {name: "", state: "none"}]);
  return items;
}

function showDocuments() {
  const items = itemsInOrder(), keys = new Set(items.map(([key]) => key));
  for (const [key, row] of rows) {
    if (keys.has(key)) continue;
    row.element.remove();
    rows.delete(key);
  }
  let before = null;
  for (const [key, item] of items) {
    if (!rows.has(key)) rows.set(key, rowOf(item.name));
    const row = rows.get(key);
    showRow(row, item);
    const place = before === null ? byId("documents").firstChild : before.nextSibling;
    if (place !== row.element) byId("documents").insertBefore(row.element, place);
    before = row.element;
  }
  showAbout();
  showFold();
  news.dispatchEvent(new Event("documents"));
}

const chosenItem = () => (state.chosen ? state.documents.get(state.chosen) : undefined);

function ready(name) {
  const item = state.documents.get(name);
  return item !== undefined && item.state === "ready" && item.usable;
}

function aboutChosen() {
  const name = state.chosen, item = chosenItem();
  if (!name) return "No document is chosen: the model answers by itself.";
  if (item === undefined) return name + " is not here: choose a document.";
  if (isBusy(item)) return "Asks " + name + " once it is read" + (item.state === "prefilling" ? " (" + number(100 * item.progress) + "%)." : ".");
  if (item.state === "failed") return name + " could not be read: choose another document.";
  return item.usable ? "Asks " + name + ". Each question stands alone." : name + " is of another model: choose another document.";
}

function showAbout() {
  byId("about").textContent = aboutChosen();
  byId("empty").hidden = state.turns.length > 0;
  byId("empty").textContent = state.documents.size + state.uploads.size === 0
      ? (missing() ? "There is no document yet. Ask the model by itself." : "Add a document. It is read once; then ask as much as you like.")
      : chosenItem() ? "Ask what you want to know of " + state.chosen + "."
      : [...state.documents.keys()].some(ready) ? "Choose a document, and ask." : "The document is being read. Ask when it is ready.";
}

// ---- the list takes one line on a small screen, until it is wanted

function fold(folded) {
  byId("side").classList.toggle("folded", folded && state.documents.size + state.uploads.size > 0);
  showFold();
}

function showFold() {
  const uploads = [...state.uploads.values()], documents = [...state.documents.values()];
  const failed = [...uploads, ...documents].filter((item) => ["failed", "refused", "taken"].includes(item.state)).length;
  const going = documents.filter(isBusy).length + uploads.length - uploads.filter((upload) => ["refused", "taken", "same"].includes(upload.state)).length;
  const parts = [state.chosen || "No document", number(documents.length) + (documents.length === 1 ? " document" : " documents")];
  if (going > 0) parts.push(number(going) + (going === 1 ? " on its way" : " on their way"));
  if (failed > 0) parts.push(number(failed) + " refused");
  byId("fold").hidden = documents.length + uploads.length === 0;
  byId("fold").textContent = parts.join(" \u00b7 ");
  byId("fold").setAttribute("aria-expanded", String(!byId("side").classList.contains("folded")));
}

function choose(name) {
  state.chosen = name;
  showAddress();
  showDocuments();
  showChosen();
}

function showChosen() {
  const row = document.querySelector("#documents .chosen");
  if (row) row.scrollIntoView({block: "nearest"});
}

// ---- what the server has

const FIND_TOKEN = "open the address that the terminal printed, or paste it here.";
// Why no documents are added from here; empty: they can be.
function missing() {
  if (can("import")) return "";
  if (!state.takes) return "This server takes no documents: another process writes its store.";
  if (state.key !== null) return "The key " + state.key + " may not add documents.";
  return recall("key") ? "The token that this page has is not this server's, so documents cannot be added or deleted: " + FIND_TOKEN
                       : "This page was opened without the token, so documents cannot be added or deleted: " + FIND_TOKEN;
}

async function loadRights() {
  const told = await (await call("/v1/models")).json();
  const {rights = null, key = null, takes_documents = true} = told.carrel || {};
  state.rights = Array.isArray(rights) ? new Set(rights) : null;
  state.key = key;
  state.takes = takes_documents;
  state.model = told.data[0].id;
  state.chat = (told.data[0].carrel || {}).chat === true;
  byId("model").textContent = state.model;
  showMissing(missing());
}

// Instead of the place to add documents.
function showMissing(why) {
  const token = state.takes && !can("import") && state.key === null;
  byId("drop").hidden = why !== "";
  byId("token").hidden = why === "" || !token;
  byId("token-label").textContent = why;
  byId("closed").hidden = why === "" || token;
  byId("closed").textContent = why;
}

state.changes = 0;  // that were made here: an older list does not undo them
async function loadDocuments() {
  for (;;) {
    const before = state.changes;
    const list = (await (await call("/v1/contexts")).json()).data;
    if (before !== state.changes) continue;
    state.documents = new Map();
    list.forEach(heard);
    break;
  }
  const [only, ...others] = state.documents.values();
  if (state.chosen === null && only !== undefined && others.length === 0 && ready(only.name)) state.chosen = only.name;
  if (byId("trouble").textContent === NO_ANSWER) trouble("");
  showDocuments();
  follow();
  pump();
}

// Follows what is being read, one document at a time: each stream takes a connection, of which a browser has six.
let following = false;
async function follow() {
  if (following) return;
  following = true;
  try {
    for (let name; (name = nextBusy()) !== undefined;) {
      try {
        for await (const item of events(await call("/v1/contexts/" + encodeURIComponent(name) + "/events"))) told(item);
      } catch (error) {
        if (error.status === 401 || error.status === 403) throw error;
        if (error.status === 0) trouble(NO_ANSWER);
        if (error.status !== 404) await pause(error.retryAfter || FIND_AGAIN_S);
      }
      await loadDocuments().catch(() => {});
      if (nextBusy() === name) await pause(1);  // the stream ended early
    }
  } catch (error) {
    trouble(error.message);
  } finally {
    following = false;
  }
}

function nextBusy() {
  const busy = [...state.documents.values()].filter(isBusy);
  const going = busy.find((item) => item.state === "prefilling");
  const first = busy.sort((one, other) => one.created - other.created)[0];
  return going ? going.name : first && first.name;
}

function told(item) {
  if (!state.documents.has(item.name)) return;  // it was removed
  heard(item);
  if (item.state === "ready") say(item.name + " is read.");
  if (item.state === "failed") say(item.name + " could not be read.");
  showDocuments();
  if (!isBusy(item)) pump();
}

async function removeNow(name) {
  await call("/v1/contexts/" + encodeURIComponent(name), {method: "DELETE"});
  ++state.changes;
  state.documents.delete(name);
}

async function removeDocument(item) {
  if (item.state === "ready" && !confirm("Delete " + item.name + "? It would have to be read anew.")) return;
  trouble("");
  try {
    await removeNow(item.name);
    files.delete(item.name);
    if (state.chosen === item.name) choose(null);
  } catch (error) {
    trouble(error.message);
  }
  loadDocuments().catch((error) => trouble(error.message));
}
