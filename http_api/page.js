// What people do.

byId("skip").addEventListener("click", (event) => { event.preventDefault(); byId("question").focus(); });
byId("fold").addEventListener("click", () => fold(!byId("side").classList.contains("folded")));
byId("ask").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
byId("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
byId("cancel").addEventListener("click", () => { state.answering.abort(); byId("question").focus(); });
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && state.answering && !byId("reading").open) state.answering.abort();
});
byId("reading-close").addEventListener("click", () => byId("reading").close());
byId("reading").addEventListener("click", (event) => { if (event.target === byId("reading")) byId("reading").close(); });
byId("reading-next").addEventListener("click", () => {
  read(reading.name, reading.sources, (reading.at + 1) % reading.sources.length);
});
byId("file").addEventListener("change", (event) => {
  addFiles([...event.target.files].map((file) => ({file, path: file.name})));
  event.target.value = "";
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    byId("drop").classList.toggle("over", kind === "dragover");
    if (kind === "drop") filesOf(event.dataTransfer).then(addFiles).catch((error) => trouble(error.message));
  });
}
for (const [form, field] of [["key", "key-text"], ["token", "token-text"]]) {
  byId(form).addEventListener("submit", (event) => {
    event.preventDefault();
    const credential = credentialIn(byId(field).value);
    if (!credential) return trouble("This is neither a key nor an address with a token.");
    keep("key", credential);
    byId(field).value = "";
    byId("key").hidden = true;
    load();
  });
}
addEventListener("hashchange", () => {
  const token = readAddress();
  showDocuments();
  if (token) load();
});
addEventListener("beforeunload", (event) => {
  const going = [...state.uploads.values()].some((upload) => upload.state === "waiting" || upload.state === "sending");
  if (going) event.preventDefault();
  state.leaving = true;
  setTimeout(() => { state.leaving = false; }, 2000);  // it stayed
});
document.addEventListener("visibilitychange", () => {
  if (document.visibilityState === "visible" && state.model) loadDocuments().catch(() => {});
});

async function load() {
  trouble("");
  try {
    await loadRights();
    tryDenied();
    await loadDocuments().catch((error) => {
      if (error.status !== 409) throw error;
      showMissing(error.message);  // there is no store
    });
  } catch (error) {
    trouble(error.message);
  }
  fold(true);
  showChosen();
}

readAddress();
state.turns = turnsKept();
for (const turn of state.turns) {
  if (turn.running) turn.error = "The page was loaded anew before the answer ended.";
  turn.running = false;
  turn.waits = "";
  showTurn(turn);
}
showAbout();
load();
