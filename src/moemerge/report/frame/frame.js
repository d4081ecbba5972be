// Light or dark: what was chosen here before, else what the system says. `theme` is told of changes.
"use strict";

// Printing and captures wait for the load event, and that waits until the returned function is
// called: a frame whose document is open is still loading.
function holdLoad() {
  const frame = document.createElement("iframe");
  frame.hidden = true;
  document.body.append(frame);
  frame.contentDocument.open();
  return () => {
    frame.contentDocument.close();
    frame.remove();
  };
}

(() => {
  const root = document.documentElement;
  const KEY = "moemerge-theme";

  function set(theme) {
    root.dataset.theme = theme;
    root.dispatchEvent(new Event("theme"));
  }
  document.getElementById("theme").addEventListener("click", () => {
    const theme = root.dataset.theme === "dark" ? "light" : "dark";
    try {
      localStorage.setItem(KEY, theme);
    } catch (refused) {
      // Without storage the choice lasts as long as the page.
    }
    set(theme);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => {
    let kept = null;
    try {
      kept = localStorage.getItem(KEY);
    } catch (refused) {
      // Without storage nothing was kept.
    }
    if (!kept) set(event.matches ? "dark" : "light");
  });
})();
