// Runs are hidden and shown everywhere at once: in curves, figures of their own, and table rows (which become pale).
const buttons = [...document.querySelectorAll("[data-toggle]")];

function toggle(run) {
  if (!hidden.delete(run)) hidden.add(run);
  showRuns();
}

function showRuns() {
  for (const button of buttons) button.setAttribute("aria-pressed", String(visible(Number(button.dataset.toggle))));
  for (const frame of document.querySelectorAll("figure[data-of]")) frame.hidden = !visible(Number(frame.dataset.of));
  for (const row of document.querySelectorAll("tr[data-run]")) row.classList.toggle("off", !visible(Number(row.dataset.run)));
  const everything = document.getElementById("show-all");
  if (everything) everything.hidden = hidden.size === 0;
  for (const figure of figures) figure.draw();
}

function listenToRuns() {
  for (const button of buttons) button.addEventListener("click", () => toggle(Number(button.dataset.toggle)));
  document.getElementById("show-all")?.addEventListener("click", () => {
    hidden.clear();
    showRuns();
  });
}
