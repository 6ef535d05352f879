"use strict";
// A button names its key, which clicks it wherever the focus is. A key that is held down clicks once.
document.addEventListener("keydown", (event) => {
  if (event.repeat || event.ctrlKey || event.altKey || event.metaKey) return;
  document.querySelector(`button[aria-keyshortcuts="${CSS.escape(event.key.toUpperCase())}"]`)?.click();
});
