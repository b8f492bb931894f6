// Translates what is typed when typing pauses, and shows where the decoder looked.

import { Picture, percent, shown } from "./picture.js";

const PAUSE = 350; // milliseconds without a key
const KEY = "keras-aiayn-api-key"; // in the storage of this tab, gone with it
const $ = (id) => document.getElementById(id);

// What the service, or the way to it, refuses: a sentence, and when to ask again, if ever.
class Refusal extends Error {
  constructor(status, told, seconds) {
    super(sentence(status, told));
    Object.assign(this, { status, seconds });
  }
}

function sentence(status, told) {
  switch (status) {
    case 0: return "The service cannot be reached.";
    case 401: return sessionStorage.getItem(KEY) ? "The API key is wrong." : "The service asks for an API key.";
    case 413: return `This is too long: ${told}.`;
    case 429: return "The service is busy; this page asks again in a moment.";
    case 408:
    case 504: return "This took too long. Try again, or with less text.";
    case 503: return "The service is about to end, or starts again.";
    default: return `The service refused: ${told}.`;
  }
}

async function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  let answer;
  let content;
  try {
    answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
    content = await answer.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(answer?.ok === false ? answer.status : 0, answer?.statusText);
  }
  if (answer.ok) return content;
  throw new Refusal(answer.status, content.error ?? answer.statusText, Number(answer.headers.get("Retry-After")));
}

// Of several things that are asked for one after the other, only the last is answered.
function latest() {
  let running = new AbortController();
  return {
    stop: () => running.abort(),
    async ask(path, body) {
      running.abort();
      const mine = running = new AbortController();
      const answer = await post(path, body, mine.signal);
      if (mine.signal.aborted) throw new DOMException("a later one came", "AbortError");
      return answer;
    },
  };
}

const translations = latest();
const attentions = latest();
let pause; // of typing, or until the service is asked again
let found = { lines: [], translations: [] };
let chosen = { line: 0, rank: 0 };
let attention = null;
const picture = new Picture($("picture"), (says) => { $("caption").textContent = says; });

function tell(says, bad = false) {
  $("status").textContent = says;
  $("status").classList.toggle("bad", bad);
  $("again").hidden = !bad;
}

// Tells what went wrong; asks again where the service said when.
function refused(error, again) {
  if (error.name === "AbortError") return;
  if (!(error instanceof Refusal)) throw error;
  tell(error.message, true);
  if (error.status === 401) $("key-form").hidden = false;
  if (error.status === 429) later(again, 1000 * (error.seconds || 1));
}

function later(what, milliseconds) {
  clearTimeout(pause);
  pause = setTimeout(what, milliseconds);
}

function typed() {
  translations.stop(); // what it would answer is of no use any more
  attentions.stop();
  later(translate, PAUSE);
}

async function translate() {
  clearTimeout(pause);
  attentions.stop();
  const lines = $("text").value.split("\n");
  if (!lines.some((line) => line.trim())) {
    translations.stop();
    tell("");
    showTranslations({ lines: [], translations: [] });
    return;
  }
  tell("Translating…");
  try {
    const answer = await translations.ask("translate", { texts: lines, n_best: Number($("n-best").value) });
    $("key-form").hidden = true;
    tell("");
    showTranslations({ lines, translations: answer.translations });
  } catch (error) {
    refused(error, translate);
  }
}

function make(name, properties, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function showTranslations(next) {
  found = next;
  const real = found.lines.map((line) => Boolean(line.trim()));
  if (!real[chosen.line]) chosen.line = Math.max(0, real.indexOf(true));
  chosen.rank = 0;
  const several = real.filter(Boolean).length > 1; // then each line's translations stand beside it
  $("result").replaceChildren(...found.translations.map((hypotheses, line) => {
    const list = make("ol", { className: "line" });
    if (real[line]) list.append(...hypotheses.map((one, rank) => hypothesis(one, line, rank)));
    if (!several) return list;
    const source = make("p", { className: "source", dir: "auto", textContent: found.lines[line] });
    return make("div", { className: "pair" }, source, list);
  }));
  $("said").textContent = found.translations.map(([best]) => best.text).join("\n");
  look();
}

function hypothesis(one, line, rank) {
  const words = make("span", { className: "words", dir: "auto", textContent: one.text });
  if (one.hit_limit) words.append(make("span", { className: "score", textContent: " (cut)" }));
  const score = make("span", { className: "score", textContent: one.score.toFixed(2).replace("-", "−") });
  score.title = "log-probability over the length penalty";
  score.prepend(make("span", { className: "unseen", textContent: "score " }));
  const button = make("button", { type: "button", className: "look", textContent: "Attention" });
  button.dataset.place = `${line} ${rank}`;
  button.setAttribute("aria-label", `Attention of: ${one.text}`);
  button.addEventListener("click", () => {
    chosen = { line, rank };
    look();
  });
  return make("li", {}, words, score, button);
}

// Asks where the decoder looked in the translation that is chosen.
async function look() {
  const place = `${chosen.line} ${chosen.rank}`;
  for (const button of document.querySelectorAll(".look")) {
    button.setAttribute("aria-pressed", button.dataset.place === place);
  }
  const one = found.translations[chosen.line]?.[chosen.rank];
  if (!one) {
    $("attention").hidden = true;
    return;
  }
  const body = { text: found.lines[chosen.line], translation: one.text };
  try {
    attention = await attentions.ask("attention", body);
    if ($("status").classList.contains("bad")) tell("");
  } catch (error) {
    if (error.name !== "AbortError") $("attention").hidden = true;
    refused(error, look);
    return;
  }
  $("attention").hidden = false;
  offer($("layer"), attention.weights.map((_, layer) => `${layer + 1}`));
  offer($("head"), ["mean of all", ...attention.weights[0].map((_, head) => `${head + 1}`)]);
  showAttention();
}

// Fills a list of choices. What was chosen stays; at first it is the last layer, the mean of heads.
function offer(select, names) {
  if (select.length === names.length) return;
  select.replaceChildren(...names.map((name) => make("option", { textContent: name })));
  select.selectedIndex = select.id === "layer" ? names.length - 1 : 0;
}

function showAttention() {
  const { source, target, weights } = attention;
  const heads = weights[$("layer").selectedIndex];
  const number = $("head").selectedIndex;
  const mean = (t, s) => heads.reduce((sum, head) => sum + head[t][s], 0) / heads.length;
  const shownWeights = number ? heads[number - 1] : target.map((_, t) => source.map((_, s) => mean(t, s)));
  picture.show(source, target, shownWeights);
  showTable(source, target, shownWeights);
}

function showTable(source, target, weights) {
  const table = $("weights").querySelector("table");
  table.tHead.replaceChildren();
  table.tBodies[0].replaceChildren();
  if (!$("weights").open) return; // it may be large: it is made when it is looked at
  const head = (token, scope) => make("th", { scope, textContent: shown(token) });
  table.tHead.append(make("tr", {}, make("td", {}), ...source.map((token) => head(token, "col"))));
  table.tBodies[0].append(...weights.map((row, t) => make("tr", {}, head(target[t], "row"),
    ...row.map((weight) => {
      const cell = make("td", { textContent: percent(weight) });
      cell.style.setProperty("--weight", weight);
      return cell;
    }))));
}

$("text").addEventListener("input", typed);
$("n-best").addEventListener("change", translate);
$("again").addEventListener("click", translate);
$("layer").addEventListener("change", showAttention);
$("head").addEventListener("change", showAttention);
$("weights").addEventListener("toggle", () => attention && showAttention());
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value);
  $("key").value = "";
  translate();
});
if ($("text").value) translate(); // what the browser kept of an earlier visit
