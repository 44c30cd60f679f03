// Questions and answers, and the passages of a document that an answer rests on.

function figuresOf(told) {
  if (!told) return "";
  const parts = [];
  if (told.context) {
    parts.push(number(told.rows_read) + " of " + number(told.context_tokens) + " rows read per token");
  }
  parts.push("first token after " + number(told.prompt_ms) + " ms");
  if (told.ms_per_token > 0) parts.push(number(told.ms_per_token, 1) + " ms per token");
  return parts.join(" \u00b7 ");
}

// What an answer is from, as its head says.
function fromOf(turn) {
  const name = (turn.figures && turn.figures.context) || turn.context;
  return name ? "From " + name : "From no document: the model answers by itself, and may make things up.";
}

// ---- sources: passages of a document that an answer rests on, in the text that they are of

const texts = new Map();  // bytes of documents that were read here, by name and content
async function textOf(name) {
  const item = state.documents.get(name);
  const id = name + " " + (item ? item.content_id : "");
  if (!texts.has(id)) {
    if (texts.size >= 4) texts.delete(texts.keys().next().value);
    texts.set(id, new Uint8Array(await (await call("/v1/contexts/" + encodeURIComponent(name) + "/text")).arrayBuffer()));
  }
  return texts.get(id);
}

// Where a source stands in these bytes: where the server says, if its words are there, or else where they are; null: nowhere.
function placeOf(source, bytes) {
  const words = new TextEncoder().encode(source.text);
  const at = (begin) => begin + words.length <= bytes.length && words.every((byte, i) => bytes[begin + i] === byte);
  if (words.length === 0) return null;
  if (at(source.bytes[0])) return [source.bytes[0], source.bytes[0] + words.length];
  for (let begin = bytes.indexOf(words[0]); begin >= 0; begin = bytes.indexOf(words[0], begin + 1)) {
    if (at(begin)) return [begin, begin + words.length];
  }
  return null;
}

const LEAST_SHARE = 0.03;  // of an answer's attention: what has less is noise
const READ_AROUND = 300000;  // bytes before and behind a source that are shown of a very long text
const reading = {sources: [], at: 0};

function goTo(index) {
  reading.at = index;
  for (const mark of document.querySelectorAll("#reading mark")) {
    mark.classList.toggle("here", Number(mark.dataset.source) === index);
  }
  const here = document.querySelector("#reading mark.here");
  if (here) here.scrollIntoView({block: "center"});
  byId("reading-place").textContent = "source " + (index + 1) + " of " + reading.sources.length;
}
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return;  // a phone's bars come and go while one scrolls
  width = innerWidth;
  if (byId("reading").open) goTo(reading.at);  // lines are others now
});

async function read(name, sources, index) {
  trouble("");
  let bytes;
  try {
    bytes = await textOf(name);
  } catch (error) {
    trouble(name + ": " + error.message);
    return;
  }
  const places = sources.map((source) => placeOf(source, bytes));
  if (places[index] === null) {
    trouble("The passage is not in the text of " + name + " as it is now.");
    return;
  }
  const decoder = new TextDecoder();
  const from = Math.max(0, places[index][0] - READ_AROUND);
  const until = Math.min(bytes.length, places[index][1] + READ_AROUND);
  const parts = [];
  let at = from;
  const order = places.map((place, i) => [place, i]).filter(([place]) => place !== null).sort((a, b) => a[0][0] - b[0][0]);
  for (const [[begin, end], i] of order) {
    if (begin < at || end > until) continue;
    parts.push(decoder.decode(bytes.slice(at, begin)));
    const mark = element("mark", "", decoder.decode(bytes.slice(begin, end)));
    mark.dataset.source = i;
    parts.push(mark);
    at = end;
  }
  parts.push(decoder.decode(bytes.slice(at, until)));
  if (from > 0) parts.unshift("[..]\n");
  if (until < bytes.length) parts.push("\n[..]");
  byId("reading-text").replaceChildren(...parts);
  byId("reading-name").textContent = name;
  byId("reading-next").hidden = sources.length < 2;
  reading.sources = sources;
  reading.name = name;
  if (!byId("reading").open) byId("reading").showModal();
  goTo(index);
}

function showSources(list, figures) {
  const sources = ((figures && figures.sources) || []).filter((source) => source.share >= LEAST_SHARE);
  if (list.childElementCount === sources.length) return;
  list.replaceChildren(...sources.map((source, i) => {
    const show = button("", undefined, () => read(figures.context, sources, i));
    show.append(element("span", "mark", String(i + 1)), element("span", "passage", source.text.trim().replace(/\s+/g, " ")),
                element("span", "quiet", number(100 * source.share) + "%"));
    show.title = "Show it in " + figures.context;
    const row = element("li");
    row.append(show);
    return row;
  }));
}

// One turn on the page; returns what changes it.
function showTurn(turn) {
  const article = element("article");
  const from = element("p", "from");
  const waits = element("p", "waits quiet");
  const answer = element("p", "answer", turn.answer);
  const error = element("p", "error", turn.error);
  const figures = element("p", "figures quiet", figuresOf(turn.figures));
  const sources = element("ol", "sources");
  sources.setAttribute("aria-label", "Sources of this answer");
  article.append(element("p", "question", turn.question), from, waits, answer, error, sources, figures);
  byId("talk").append(article);
  const update = () => {
    const talk = byId("talk");
    const atEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 80;
    from.textContent = fromOf(turn);
    from.classList.toggle("alone", from.textContent.startsWith("From no document"));
    waits.textContent = turn.waits || "";
    answer.textContent = turn.answer;
    error.textContent = turn.error;
    figures.textContent = figuresOf(turn.figures);
    showSources(sources, turn.figures);
    article.classList.toggle("running", turn.running);
    article.setAttribute("aria-busy", String(turn.running));
    if (atEnd) talk.scrollTop = talk.scrollHeight;
  };
  update();
  byId("talk").scrollTop = byId("talk").scrollHeight;
  if (turn.running) article.scrollIntoView({block: "end"});
  return update;
}

function keepTurns() { keep("turns", JSON.stringify(state.turns.slice(-50))); }

function turnsKept() {
  try {
    const turns = JSON.parse(recall("turns") || "[]");
    return Array.isArray(turns) ? turns.filter((turn) => turn && typeof turn.question === "string") : [];
  } catch (error) {
    return [];
  }
}

function body(turn) {
  const common = {
    model: state.model, temperature: 0, max_tokens: 1024, stream: true, stream_options: {include_usage: true}};
  if (turn.context) {
    common.context = turn.context;
    common.sources = 3;
  }
  if (state.chat) return ["/v1/chat/completions", {...common, messages: [{role: "user", content: turn.question}]}];
  return ["/v1/completions", {...common, prompt: "\n\nQuestion: " + turn.question + "\nAnswer:", stop: ["\n\nQuestion:"]}];
}

// ---- a question waits for its document, and for a server that has enough to do

function wait(turn, why, update) {
  if (!turn.waits) say(why);
  turn.waits = why;
  update();
}

async function untilRead(turn, signal, update) {
  if (!turn.context) return;
  for (let item; (item = state.documents.get(turn.context)) !== undefined && item.state !== "ready";) {
    if (item.state === "failed") throw new Error(item.name + " could not be read: " + about(item));
    wait(turn, "Waits until " + item.name + " is read: " + about(item), update);
    await pause(600, signal, "documents");
  }
}

async function answerOf(turn, signal, update) {
  const [path, request] = body(turn);
  for (;;) {
    await untilRead(turn, signal, update);
    try {
      const response = await call(path, {
        method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(request), signal});
      turn.waits = "";
      return response;
    } catch (error) {
      if (!(error instanceof Refusal) || error.retryAfter === 0 || ![429, 503].includes(error.status)) throw error;
      wait(turn, `${error.message} (asks again in ${number(error.retryAfter)} s)`, update);
      if (turn.context) loadDocuments().catch(() => {});  // it may be read just now
      await pause(error.retryAfter, signal);
    }
  }
}

const ENDS = {length: "The answer was cut off at its greatest length.", "": "The answer broke off."};

async function listen(turn, response, update) {
  let finish = "";
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    if (event.carrel) turn.figures = event.carrel;
    for (const choice of event.choices || []) {
      const piece = choice.delta ? choice.delta.content : choice.text;
      if (piece) turn.answer = (turn.answer + piece).trimStart();
      finish = choice.finish_reason || finish;
    }
    update();
  }
  turn.error = ENDS[finish] || "";
  if (finish && !turn.answer) turn.error = "The answer is empty: the model ended it at once.";
}

async function ask(question) {
  const turn = {question, context: state.chosen || "", answer: "", waits: "", error: "", figures: null, running: true};
  state.turns.push(turn);
  const update = showTurn(turn);
  showAbout();
  keepTurns();
  const abort = state.answering = new AbortController();
  showBusy();
  try {
    await listen(turn, await answerOf(turn, abort.signal, update), update);
  } catch (error) {
    if (state.leaving) return;  // the browser ended the request: what is kept says that it ran
    turn.error = abort.signal.aborted ? "Cancelled." : error.message;
  }
  turn.running = false;
  turn.waits = "";
  state.answering = null;
  update();
  say([turn.answer, turn.error].filter(Boolean).join(" "));
  keepTurns();
  showBusy();
}

function showBusy() {
  const busy = state.answering !== null;
  byId("send").hidden = busy;
  byId("cancel").hidden = !busy;
}

function submit() {
  const field = byId("question");
  const question = field.value.trim();
  if (!question) return;
  if (state.answering) return note("One question at a time: Escape cancels the one that is being answered.");
  note("");
  trouble("");
  field.value = "";
  ask(question);
}
