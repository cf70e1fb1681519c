// Boxes that scroll sideways can be reached with the keyboard; boxes that fit are no tab stops.
function scrollStops() {
  const boxes = ".katex-display, .pst-scrollable-table-container, .cell_output .output, div.highlight pre";
  for (const box of document.querySelectorAll(boxes)) {
    if (box.scrollWidth > box.clientWidth + 1) {
      box.tabIndex = 0;
      box.setAttribute("role", "region");
      box.setAttribute("aria-label", "scrolls sideways");
    } else {
      for (const name of ["tabindex", "role", "aria-label"]) box.removeAttribute(name);
    }
  }
}
addEventListener("load", scrollStops);
addEventListener("resize", scrollStops);
document.addEventListener("toggle", scrollStops, true);
document.fonts?.ready.then(scrollStops);

// Paper is light.
let shown;
addEventListener("beforeprint", () => {
  shown = document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = "light";
});
addEventListener("afterprint", () => {
  document.documentElement.dataset.theme = shown;
});

// From a disk a page may not read another, so the search shows titles without snippets.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
