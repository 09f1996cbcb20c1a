// Set the theme before the page is drawn: light, dark, or the theme of the system.
"use strict";
(function () {
  const names = ["system", "light", "dark"];
  function stored() {
    try {
      return localStorage.getItem("tidemill-theme");
    } catch (_) {
      return null;
    }
  }
  function apply(name) {
    document.documentElement.dataset.theme = names.includes(name) ? name : "system";
  }
  apply(stored());
  window.tidemillTheme = function () {
    const now = names.indexOf(document.documentElement.dataset.theme);
    const next = names[(now + 1) % names.length];
    try {
      localStorage.setItem("tidemill-theme", next);
    } catch (_) {
      // The theme lasts as long as the page.
    }
    apply(next);
    return next;
  };
})();
