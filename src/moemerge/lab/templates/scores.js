// Unpacks the answers and shows them problem by problem. Texts are set as text, never as markup.
"use strict";
(() => {
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);
  const MOST_LISTED = 500;
  let data = null; // {models, tasks: [{name, title, problems: [{name, prompt, expected, scores, texts}]}]}
  let listed = [];
  let chosen = 0;

  async function unpack(id) {
    const bytes = Uint8Array.from(atob(byId(id).textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }

  function element(tag, className, text) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function fill(select, texts, selected) {
    select.replaceChildren(...texts.map((text, place) => {
      const option = element("option", "", text);
      option.value = String(place);
      option.selected = place === selected;
      return option;
    }));
  }

  const value = (id) => Number(byId(id).value);
  const difference = (problem) => problem.scores[value("right")] - problem.scores[value("left")];
  const isCut = (problem) =>
    [value("left"), value("right")].some((side) => problem.texts[side].some((one) => one.cut));
  const SHOWN = {
    differing: (problem) => difference(problem) !== 0,
    won: (problem) => difference(problem) > 0,
    lost: (problem) => difference(problem) < 0,
    cut: isCut,
    all: () => true,
  };

  function holds(problem, words) {
    if (!words) return true;
    const sides = [...problem.texts[value("left")], ...problem.texts[value("right")]];
    const texts = [problem.name, problem.prompt, ...sides.map((one) => one.text)];
    return texts.some((text) => text.toLowerCase().includes(words));
  }

  function list() {
    const task = data.tasks[value("task")];
    const words = byId("search").value.trim().toLowerCase();
    const problems = task ? task.problems : [];
    listed = problems.filter((p) => SHOWN[byId("show").value](p) && holds(p, words));
    const more = listed.length > MOST_LISTED ? `, the first ${MOST_LISTED} are listed` : "";
    byId("count").textContent = `${listed.length} of ${problems.length} problems${more}`;
    byId("list").replaceChildren(...listed.slice(0, MOST_LISTED).map((problem, place) => {
      const item = element("li");
      const button = element("button");
      button.type = "button";
      button.dataset.place = String(place);
      button.append(element("span", "", problem.name));
      const gain = difference(problem);
      if (gain) {
        const points = `${gain > 0 ? "+" : "−"}${Math.round(100 * Math.abs(gain))}`;
        button.append(element("span", gain > 0 ? "won" : "lost", points));
      }
      item.append(button);
      return item;
    }));
    show(0);
  }

  function side(problem, number) {
    const made = element("div", "side");
    made.append(element("h4", "", `${data.models[number]}: ${(100 * problem.scores[number]).toFixed(0)}% right`));
    for (const one of problem.texts[number]) {
      made.append(element("span", `grade ${one.grade === "right" ? "right" : ""}`, one.grade));
      if (one.cut) made.append(element("span", "grade cut", "cut at the token limit"));
      if (one.detail) made.append(element("p", "detail", one.detail));
      made.append(element("pre", "", one.text));
    }
    return made;
  }

  function show(place) {
    chosen = place;
    const problem = listed[place];
    for (const button of byId("list").querySelectorAll("button")) {
      const current = Number(button.dataset.place) === place;
      if (current) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    }
    if (!problem) {
      byId("problem").replaceChildren(element("p", "facts", "No problem to show."));
      return;
    }
    const sides = element("div", "sides");
    sides.append(side(problem, value("left")));
    if (value("left") !== value("right")) sides.append(side(problem, value("right")));
    const parts = [element("h3", "", problem.name), element("pre", "prompt", problem.prompt)];
    if (problem.expected) parts.push(element("h4", "", "Expected"), element("pre", "expected", problem.expected));
    byId("problem").replaceChildren(...parts, sides);
  }

  byId("list").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) show(Number(button.dataset.place));
  });
  byId("list").addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step || !listed.length) return;
    event.preventDefault();
    show(Math.max(0, Math.min(Math.min(listed.length, MOST_LISTED) - 1, chosen + step)));
    const current = byId("list").querySelector("[aria-current]");
    current.focus();
    current.scrollIntoView({ block: "nearest" });
  });
  for (const id of ["task", "left", "right", "show"]) byId(id).addEventListener("change", list);
  byId("search").addEventListener("input", list);

  unpack("answers").then((content) => {
    data = content;
    fill(byId("task"), data.tasks.map((task) => task.title), 0);
    fill(byId("left"), data.models, 0);
    fill(byId("right"), data.models, Math.min(1, data.models.length - 1));
    if (data.models.length < 2) byId("show").value = "all";
    list();
    root.dataset.ready = "yes";
  }).catch((error) => {
    byId("trouble").hidden = false;
    byId("trouble").textContent = `The answers could not be shown: ${error.message}`;
    root.dataset.ready = "no";
  }).finally(holdLoad());
})();
