// A classic script that runs before the page is drawn, so that the page does not flash in the other theme.
(() => {
  const chosen = localStorage.getItem("headgate-theme");
  if (chosen === "light" || chosen === "dark") {
    document.documentElement.dataset.theme = chosen;
  }
})();
