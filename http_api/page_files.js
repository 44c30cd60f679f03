// Files on their way to the server: they wait here while it has no room, and each says what became of it.

const MOST_ON_SERVER = 8;  // documents that wait there, or are read; the others wait in the page
const MOST_FILES = 1000;   // of one folder
const FIND_AGAIN_S = 5;    // between tries to reach a server that does not answer
const MOST_NAME = 128;     // bytes of a context's name

const files = new Map();   // by document: what was sent from here, to try again
const queue = {sending: false, until: 0, last: 0};

// As the server names contexts: A-Z a-z 0-9 . _ -. The ending stays. Where letters are lost, a digest tells such names apart.
function nameOf(path) {
  const plain = path.normalize("NFKD").replace(/\p{M}/gu, "");
  const ending = (/[^./](\.[A-Za-z0-9]{1,16})$/.exec(plain) || ["", ""])[1];
  const stem = plain.slice(0, plain.length - ending.length);
  const lost = /(?![A-Za-z0-9])[\p{L}\p{N}]/u.test(stem) ? "-" + digestOf(path) : "";
  const kept = stem.replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[^A-Za-z0-9]+|-+$/g, "") || "document";
  return kept.slice(0, MOST_NAME - lost.length - ending.length) + lost + ending;
}

function digestOf(text) {  // FNV-1a
  let digest = 0x811c9dc5;
  for (const byte of new TextEncoder().encode(text)) digest = Math.imul(digest ^ byte, 0x01000193) >>> 0;
  return digest.toString(16).padStart(8, "0");
}

// A name like it that is free as far as the page knows.
function freeName(name) {
  const [, stem, ending] = /^(.*?)(\.[A-Za-z0-9]+)?$/.exec(name);
  const taken = new Set([...state.documents.keys(), ...[...state.uploads.values()].map((upload) => upload.name)]);
  for (let i = 2;; ++i) {
    const tail = "-" + i + (ending || "");
    const other = stem.slice(0, MOST_NAME - tail.length) + tail;
    if (!taken.has(other)) return other;
  }
}

function addFiles(list) {
  if (list.length === 0) return;
  trouble("");
  note("");
  if (!can("import")) {
    trouble(state.takes && state.key === null ? "Documents cannot be added without the token." : missing());
    fold(false);
    byId("token-text").focus();
    return;
  }
  for (const {file, path} of list) {
    const id = ++queue.last;
    state.uploads.set(id, {
      id, file, path, name: nameOf(path), state: "waiting", message: "", alone: list.length === 1, abort: new AbortController()});
  }
  showDocuments();
  pump();
}

// What was dropped, and what is in folders that were; what begins with a dot is left out there.
async function filesOf(transfer) {
  const found = [], folders = [];
  for (const item of transfer.items) {
    if (item.kind !== "file") continue;
    const entry = item.webkitGetAsEntry ? item.webkitGetAsEntry() : null;
    const file = item.getAsFile();
    if (entry && entry.isDirectory) folders.push(entry); else if (file) found.push({file, path: file.name});
  }
  while (folders.length > 0) {
    const folder = folders.shift(), reader = folder.createReader();
    for (;;) {
      const entries = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
      if (entries.length === 0) break;
      for (const entry of entries) {
        if (entry.name.startsWith(".")) continue;
        if (entry.isDirectory) { folders.push(entry); continue; }
        if (found.length >= MOST_FILES) throw new Error("The folder has more than " + number(MOST_FILES) + " files: none was added.");
        found.push({file: await new Promise((resolve, reject) => entry.file(resolve, reject)), path: entry.fullPath.slice(1)});
      }
    }
  }
  return found;
}

// ---- the queue: one file is sent at a time

function pump() {
  if (queue.sending) return;
  const wait = queue.until - Date.now();
  if (wait > 0) {
    setTimeout(pump, wait + 10);
    return;
  }
  const next = [...state.uploads.values()].find((upload) => upload.state === "waiting");
  if (!next || [...state.documents.values()].filter(isBusy).length >= MOST_ON_SERVER) return;
  send(next);
}

async function send(upload) {
  queue.sending = true;
  Object.assign(upload, {state: "sending", message: ""});
  showDocuments();
  try {
    accepted(upload, await sent(upload));
  } catch (error) {
    if (state.uploads.has(upload.id)) await refused(upload, error);
  }
  queue.sending = false;
  showDocuments();
  follow();
  pump();
}

async function sent(upload) {
  try {
    await upload.file.slice(0, 1).arrayBuffer();
  } catch (error) {
    throw new Refusal(400, "The file cannot be read: was it moved or changed, or is it a folder?");
  }
  const response = await call("/v1/contexts?name=" + encodeURIComponent(upload.name), {
    method: "POST", headers: {"Content-Type": "text/plain; charset=utf-8"}, body: upload.file, signal: upload.abort.signal});
  return response.json();
}

function accepted(upload, item) {
  if (!state.uploads.delete(upload.id)) {  // it was removed while the server took it
    removeNow(item.name).catch((error) => trouble(error.message));
    return;
  }
  ++state.changes;
  state.documents.set(item.name, item);
  files.set(item.name, upload.file);
  if (item.existed) return isHere(upload, item.name);
  if (item.remark) note(upload.path + ": " + item.remark);
  if (state.chosen === null) choose(item.name);
}

// The same text under this name or another. One of many files keeps its row, which says so.
function isHere(upload, name) {
  const where = name === upload.name ? "is here already" : "is here already, as " + name;
  if (upload.alone) {
    state.uploads.delete(upload.id);
    note(upload.path + " " + where + ".");
    choose(name);
  } else {
    state.uploads.set(upload.id, Object.assign(upload, {state: "same", message: where}));
  }
}

async function refused(upload, error) {
  const again = error.status === 0 && !await reaches() ? FIND_AGAIN_S : error.retryAfter || 0;
  if (again > 0) {
    queue.until = Date.now() + 1000 * again;
    Object.assign(upload, {state: "waiting", message: `${error.message} (tries again in ${number(again)} s)`});
    return;
  }
  const denied = error.status === 401 || error.status === 403;
  if (denied) await loadRights().catch(() => {});  // of the server as it is now: so it is known why
  const cut = `The server ended the connection while ${size(upload.file.size)} were sent: is the file larger than it takes?`;
  Object.assign(upload, {state: "refused", denied, message: error.status === 0 ? cut : (denied && missing()) || error.message});
  if (error.status !== 409) return;
  await loadDocuments().catch(() => {});
  const same = error.told.code === "context_exists" && /is context "([^"]+)"/.exec(error.message);
  if (same && state.documents.has(same[1])) return isHere(upload, same[1]);
  if (state.documents.has(upload.name)) upload.state = "taken";
}

async function reaches() {
  try { return (await fetch("/", {method: "HEAD"})).ok; } catch (error) { return false; }
}

function tryAgain(upload, name = upload.name) {
  Object.assign(upload, {name, state: "waiting", message: "", abort: new AbortController()});
  showDocuments();
  pump();
}

function rename(upload, name) {
  if (/^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$/.test(name)) return tryAgain(upload, name);
  upload.message = "A name has 1 to 128 of A-Z a-z 0-9 . _ and -, and does not begin with . or -.";
  showDocuments();
}

// Those that were refused for want of a token or key, once there is one.
function tryDenied() {
  for (const upload of state.uploads.values()) {
    if (upload.denied && upload.state === "refused" && can("import")) Object.assign(upload, {state: "waiting", denied: false});
  }
}

function forget(upload) {
  state.uploads.delete(upload.id);
  upload.abort.abort();
  showDocuments();
}

async function replace(upload) {
  if (!confirm("Replace " + upload.name + "? The text that is there now is deleted, and the new one read.")) return;
  try {
    await removeNow(upload.name);
    tryAgain(upload);
  } catch (error) {
    upload.message = error.message;
    showDocuments();
  }
}
