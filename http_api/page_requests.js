"use strict";
// What the page knows, what it was opened with, and how it asks the server.

const byId = (id) => document.getElementById(id);
// All text of others becomes text, never markup.
function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

const state = {
  model: "", chat: false,
  rights: null,          // of who asks; null: the server does not say
  key: null,             // the name of the key that was presented; null: the server has no keys
  takes: true,           // whether the server takes documents at all
  documents: new Map(),  // the server's, by name
  uploads: new Map(),    // files that are not the server's yet, by number
  chosen: null,          // a name; "": no document, as somebody said; null: nobody said anything
  answering: null,       // AbortController
  leaving: false,        // the page is being left: what breaks off is no fault of the server's
  turns: [],
};
const can = (right) => (state.takes || right === "list" || right === "open") && (state.rights === null || state.rights.has(right));

function number(value, digits = 0) {
  return value.toLocaleString("en", {maximumFractionDigits: digits, minimumFractionDigits: digits});
}
function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit + 1 < units.length) { bytes /= 1024; ++unit; }
  return number(bytes, unit > 0 && bytes < 100 ? 1 : 0) + " " + units[unit];
}

function trouble(message) { byId("trouble").textContent = message; }
function note(message) { byId("note").textContent = message; }
function say(message) { byId("said").replaceChildren(element("span", "", message)); }  // to who does not see the page

// ---- what lasts as long as the tab. Of one tab: whoever serves this address later finds no token here.

const forgotten = new Map();  // where the browser keeps nothing
function recall(name) {
  try { return sessionStorage.getItem(name) || ""; } catch (error) { return forgotten.get(name) || ""; }
}
function keep(name, value) {
  try {
    sessionStorage.setItem(name, value);
  } catch (error) {  // full, or not allowed
    forgotten.set(name, value);
  }
}

// ---- the address: #NAME&token=TOKEN, both encoded as in any address; other parts, and broken ones, are left out

function decoded(part) {
  try { return decodeURIComponent(part); } catch (error) { return ""; }
}

function partsOf(fragment) {
  const parts = {name: "", token: ""};
  for (const part of fragment.replace(/^#/, "").split("&")) {
    if (!part.includes("=")) parts.name = parts.name || decoded(part);
    if (part.startsWith("token=")) parts.token = credentialIn(part);
  }
  return parts;
}

// A key or a token in what somebody pasted: itself, or an address that has it; empty: neither.
function credentialIn(text) {
  const found = /(?:^|[#?&])token=([^&#\s]*)/.exec(text);
  const credential = found ? decoded(found[1]) : text.trim();
  return /^[\x21-\x7e]{1,1024}$/.test(credential) && !credential.includes("://") ? credential : "";
}

// Takes the token, which then is not to be seen any more; returns whether there was one.
function readAddress() {
  const parts = partsOf(location.hash);
  if (parts.token) keep("key", parts.token);
  state.chosen = parts.name || (parts.token ? state.chosen : null);
  showAddress();
  return parts.token !== "";
}

function showAddress() {
  history.replaceState(null, "", location.pathname + (state.chosen ? "#" + encodeURIComponent(state.chosen) : ""));
}

// ---- requests

const NO_ANSWER = "The server does not answer: does it still run?";
const SAID_OF = {
  413: "Too large for this server",
  415: "Not a text that this server reads",
  429: "The server has enough to do",
  503: "The server is not ready for it",
  507: "The server's disk is full",
};

class Refusal extends Error {
  // retryAfter: seconds; 0: it would be the same again. told: the server's error.
  constructor(status, message, retryAfter = 0, told = {}) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
    this.told = told;
  }
}

function secondsOf(header) {
  if (!header) return 0;
  const seconds = /^\d+$/.test(header.trim()) ? Number(header) : (Date.parse(header) - Date.now()) / 1000;
  return Number.isFinite(seconds) ? Math.min(60, Math.max(1, seconds)) : 0;
}

async function refusalOf(response) {
  let told = {};
  try { told = (await response.json()).error || {}; } catch (error) { /* no JSON: the status says it */ }
  const message = told.message || response.status + " " + response.statusText;
  if (response.status === 401) wantKey();
  const what = SAID_OF[response.status];
  return new Refusal(response.status, what ? what + ": " + message : message, secondsOf(response.headers.get("Retry-After")), told);
}

async function call(path, options = {}) {
  const headers = new Headers(options.headers);
  const key = recall("key");
  if (key) headers.set("Authorization", "Bearer " + key);
  let response;
  try {
    response = await fetch(path, {...options, headers});
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, NO_ANSWER);
  }
  if (response.ok) return response;
  throw await refusalOf(response);
}

// The data of server-sent events, one by one.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const {value, done} = await reader.read();
      if (done) return;
      text += value;
      for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
        const line = text.slice(0, end);
        if (line === "data: [DONE]") return;
        if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
      }
    }
  } finally {
    reader.cancel().catch(() => {});  // a browser has six connections to a server, and no more
  }
}

// Until so many seconds are over, or one of the news comes; throws when the signal says so.
const news = new EventTarget();
function pause(seconds, signal, until) {
  return new Promise((resolve, reject) => {
    const done = (settle) => (value) => {
      clearTimeout(timer);
      if (until) news.removeEventListener(until, ended);
      if (signal) signal.removeEventListener("abort", stopped);
      settle(value);
    };
    const ended = done(() => resolve());
    const stopped = done(() => reject(signal.reason));
    const timer = setTimeout(ended, 1000 * seconds);
    if (until) news.addEventListener(until, ended);
    if (signal) signal.addEventListener("abort", stopped);
    if (signal && signal.aborted) stopped();
  });
}

function wantKey() {
  byId("key").hidden = false;
  byId("key-label").textContent = recall("key") ? "The key or token that this page has is not valid here. Another:"
                                                : "This server wants a key:";
}
