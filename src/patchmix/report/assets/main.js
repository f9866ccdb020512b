// Starts what the page holds.

const data = JSON.parse(document.getElementById("data").textContent);

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});

for (const button of document.querySelectorAll("button[data-copies]")) {
  button.addEventListener("click", async () => {
    const text = document.getElementById(button.dataset.copies);
    try {
      await navigator.clipboard.writeText(text.textContent);
      button.textContent = "copied";
    } catch { // a page from disk may not write to the clipboard: select, so that the user can
      getSelection().selectAllChildren(text);
      button.textContent = "selected";
    }
  });
}

if (data.curves) startCurves(document.getElementById("curves-here"), data.curves);
if (data.explorer) startExplorer(document.getElementById("explorer-here"), data.explorer);
