"use strict";
// What models wrote gets into the page by textContent alone.
const at = id => document.getElementById(id), filters = at("filters");
const make = (name, text, more) => Object.assign(document.createElement(name), {textContent: text}, more);
const count = number => number.toLocaleString("en");
const MOST = 60000; // tokens that are shown unfolded at once
const NATS = [-0.05, -0.7, -2.3, -4.6]; // 95%, 50%, 10%, 1%
const shown = new Map(); // name -> trajectory
const run = new URLSearchParams(location.search).get("run") ?? ""; // that is meant
let offset = 0, lists = 0, shows = 0, waits;

async function ask(path) {
  const answer = await fetch(path), said = await answer.json();
  if (!answer.ok) throw new Error(said.error);
  return said;
}

const tell = (place, text, wrong) => Object.assign(at(place), {textContent: text, className: wrong ? "wrong" : ""});
const trying = (action, place = "count") => action().catch(error => tell(place, error.message, true));

async function list(first) {
  const mine = ++lists;
  const fields = new URLSearchParams([...new FormData(filters), ["run", run]].filter(([, value]) => value));
  history.replaceState(null, "", `?${fields}${location.hash}`);
  const said = await ask(`api/rows?${fields}&offset=${first}`);
  if (mine !== lists) return; // another question was asked since
  const unread = filters.text.value && said.searched < said.total;
  tell("count", `${count(said.found)} of ${count(said.total)} trajectories`
    + (unread ? `; only the texts of the first ${count(said.searched)} are read yet` : ""));
  const rows = said.rows.map(row => {
    const line = make("tr", ""), link = make("td", "");
    link.append(make("a", row.name, {href: `#${row.name}`}));
    line.append(link, ...["part", "step", "version", "staleness", "reward", "tokens", "prompt", "reason", "head"]
      .map(name => make("td", row[name] === -1 ? "–" : row[name], {title: row[name]})));
    return line;
  });
  if (!first) at("rows").replaceChildren();
  at("rows").append(...rows);
  offset = first + rows.length;
  at("more").hidden = offset >= said.found;
}

function tint(one, index) { // number of a colour, 0 for none
  const mode = at("colour").value, version = one.versions[index], logprob = one.logprobs[index];
  if (mode === "source") return version === undefined ? 6 : 1;
  if (mode === "draft" || version === undefined) return 0;
  if (mode === "version") return 1 + version % 6;
  return logprob === null ? 0 : 1 + NATS.filter(bound => logprob < bound).length;
}

function paint() {
  for (const token of at("columns").querySelectorAll("span")) {
    const one = shown.get(token.closest("article").id), index = Number(token.dataset.index);
    token.className = `t${tint(one, index)}${one.marks.has(index) ? " marked" : ""}`;
  }
  const all = [...shown.values()], versions = new Set(all.flatMap(one => one.spans.map(([version]) => version)));
  const drafts = one => one.drafts?.[0] == null ? `${one.name}: no drafts recorded`
    : `${one.name}: in its group ${one.drafts[0]} tokens drafted, ${one.drafts[1]} right, ${one.drafts[2]} passes`;
  const legend = {
    logprob: ["≥ 95%", "≥ 50%", "≥ 10%", "≥ 1%", "less"].map((text, i) => [text, i + 1]),
    version: [...versions].sort((a, b) => a - b).map(version => [`version ${version}`, 1 + version % 6]),
    draft: [["which tokens were drafted is not recorded", 0], ...all.map(one => [drafts(one), 0])],
    source: [["sampled", 1], ["observed", 6]],
  }[at("colour").value];
  at("legend").replaceChildren(...legend.map(([text, number]) => make("span", text, {className: `t${number}`})));
  const {of} = at("columns").dataset;
  if (of > all.length) at("legend").append(make("span", `the nearest ${all.length} of ${of}`));
  if (all.some(one => one.marked.length)) at("legend").append(make("span", "not in the version before", {className: "marked"}));
  choose();
}

function folded(title, pieces, first, open) { // text of tokens, made when it is opened
  const box = make("details", "", {first, stop: first + pieces.length}), text = make("pre", "");
  box.fill = () => {
    if (!text.firstChild) text.append(...pieces.map((piece, i) => {
      const token = make("span", piece);
      token.dataset.index = first + i;
      return first < 0 ? piece : token;
    }));
    box.open = true;
  };
  box.addEventListener("toggle", () => { if (box.open && !text.firstChild) { box.fill(); paint(); } });
  box.append(make("summary", title), text);
  if (open) box.fill();
  return box;
}

function article(one, open) {
  const box = make("article", "", {id: one.name}), size = one.pieces.length;
  one.versions = [];
  one.spans.forEach(([version, start, stop]) => { for (let i = start; i < stop; i++) one.versions[i] = version; });
  one.marks = new Set(one.marked.flatMap(([start, stop]) => Array.from({length: stop - start}, (_, i) => start + i)));
  box.append(make("h3", `${one.name}: reward ${one.reward}, version ${one.version}`),
    make("p", `${one.part}, ${one.step < 0 ? "" : `step ${one.step}, staleness ${one.staleness}, `}${one.prompt}, `
      + `sample ${one.sample} of group ${one.group}, advantage ${one.advantage}`),
    make("p", one.reason),
    folded(`prompt, ${one.context.length} tokens`, one.context, -1e9, open && one.context.length < 200));
  const cuts = [...new Set([0, size, ...one.observed.flat(), ...one.breaks])].sort((a, b) => a - b);
  let turn = 0;
  cuts.slice(0, -1).forEach((start, i) => {
    const pieces = one.pieces.slice(start, cuts[i + 1]), sampled = one.versions[start] !== undefined;
    if (one.breaks.includes(start)) box.append(make("p", "the context begins afresh"));
    box.append(folded(sampled ? `turn ${++turn}, ${pieces.length} tokens`
      : `observed, ${pieces.length} tokens: ${pieces.join("").trim().slice(0, 60)}`, pieces, start, open && sampled));
  });
  return box;
}

function named() { // what the address names: trajectory, token, view
  const found = /^#([tfv]\d+\.\d+)(?:\/(\d+))?(?:\/(group|versions))?$/.exec(location.hash);
  return found && {name: found[1], token: found[2], view: found[3] ?? "one"};
}

async function show() {
  const mine = ++shows, {name, token, view} = named() ?? {};
  at("shown").hidden = !name;
  if (!name) return;
  const fresh = at("columns").dataset.view !== view || !shown.has(name) || (view === "one" && shown.size > 1);
  if (fresh) {
    const said = await ask(`api/${view}/${name}?${new URLSearchParams({run})}`);
    if (mine !== shows) return;
    shown.clear();
    said.shown.forEach(one => shown.set(one.name, one));
    const open = said.shown.reduce((sum, one) => sum + one.pieces.length, 0) < MOST;
    at("columns").replaceChildren(...said.shown.map(one => article(one, open)));
    Object.assign(at("columns").dataset, {view, of: said.of});
    paint();
  }
  for (const other of ["one", "group", "versions"]) {
    at(other).href = `#${name}${other === "one" ? "" : `/${other}`}`;
    other === view ? at(other).setAttribute("aria-current", "true") : at(other).removeAttribute("aria-current");
  }
  choose();
  const place = token ? document.querySelector(".chosen") : fresh ? at("shown") : null;
  place?.scrollIntoView({block: !token ? "start" : fresh ? "center" : "nearest"});
}

function choose() { // the token that the address names
  const {name, token} = named() ?? {}, one = shown.get(name), index = Number(token);
  document.querySelector(".chosen")?.classList.remove("chosen");
  tell("token", "");
  if (!one || token === undefined) return;
  const boxes = [...document.getElementById(name).querySelectorAll("details")];
  const box = boxes.find(each => each.first <= index && index < each.stop);
  if (!box) return at("token").textContent = `${name} has no token ${token}`;
  if (!box.open) { box.fill(); return paint(); }
  box.querySelector(`[data-index="${index}"]`).classList.add("chosen");
  const version = one.versions[index], logprob = one.logprobs[index];
  at("token").textContent = `token ${index} of ${name}: ${JSON.stringify(one.pieces[index])}, number ${one.ids[index]}, `
    + (version === undefined ? "observed" : `version ${version}, log-probability ${logprob ?? "unknown"}`);
}

at("columns").addEventListener("click", ({target}) => {
  const view = named().view, index = target.dataset.index;
  if (index) location.hash = `${target.closest("article").id}/${index}${view === "one" ? "" : `/${view}`}`;
});
filters.addEventListener("input", () => { clearTimeout(waits); waits = setTimeout(() => trying(() => list(0)), 150); });
filters.addEventListener("submit", event => event.preventDefault());
at("more").addEventListener("click", () => trying(() => list(offset)));
at("colour").addEventListener("change", paint);
addEventListener("hashchange", () => trying(show, "token"));
for (const [name, value] of new URLSearchParams(location.search)) if (filters.elements[name]) filters.elements[name].value = value;
trying(() => list(0)).then(() => trying(show, "token")); // whose place depends on the list's length
trying(async () => {
  const said = await ask("api/run");
  at("run").textContent = said.run;
  at("figures").append(...said.figures.flatMap(([label, text]) => [make("dt", label), make("dd", text)]));
  at("lacks").append(...said.lacks.map(text => make("li", `The record has not: ${text}`)));
});
