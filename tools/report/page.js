// Sort and filter the page's content. Without this script the page is complete but cannot be sorted.
"use strict";

const form = document.getElementById("filters");
const kernels = [...document.querySelectorAll("#kernels tbody tr")].map((row) => ({ row, text: row.textContent.toLowerCase() }));
const lines = [...document.querySelectorAll("#matrix tbody tr")].map((row) => ({ row, cells: [...row.querySelectorAll(".cell")] }));
const FACETS = ["op", "element", "arch", "backend", "status"];

/** The form's chosen values, without the empty ones. */
function chosen() {
  return Object.fromEntries([...new FormData(form)].filter(([, value]) => value.trim() !== ""));
}

function apply() {
  const wanted = chosen();
  const fits = (data, names) => names.every((name) => !wanted[name] || data[name] === wanted[name]);
  const words = (wanted.q || "").toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const { row, text } of kernels) {
    row.hidden = !(fits(row.dataset, FACETS) && words.every((word) => text.includes(word)));
    shown += row.hidden ? 0 : 1;
  }
  for (const { row, cells } of lines) {
    let any = false;
    for (const cell of cells) {
      const status = !wanted.status || cell.querySelector(`[data-status="${CSS.escape(wanted.status)}"]`);
      const on = fits(cell.dataset, ["arch", "backend"]) && Boolean(status);
      cell.classList.toggle("off", !on);
      any ||= on;
    }
    const narrowed = wanted.arch || wanted.backend || wanted.status;
    row.hidden = !fits(row.dataset, ["op", "element"]) || (Boolean(narrowed) && !any);
  }
  const all = kernels.length.toLocaleString("en");
  document.getElementById("count").value = `${shown.toLocaleString("en")} of ${all} kernels`;
}

/** Fill the form from the address: `#status=stale&backend=pycuda`. The address of a section does not change it. */
function recall() {
  if (!location.hash || location.hash.includes("=")) {
    const told = new URLSearchParams(location.hash.slice(1));
    for (const field of form.elements) {
      if (field.name) field.value = told.get(field.name) ?? "";
    }
  }
  apply();
}

function remember() {
  const told = new URLSearchParams(chosen()).toString();
  history.replaceState(null, "", told ? `#${told}` : location.pathname + location.search);
  apply();
}

/** Compare numbers by value and everything else as text; empty values are last in both directions. */
function compare(a, b, sign) {
  if (a === "" || b === "") return (a === "") - (b === "");
  const difference = Number(a) - Number(b);
  return sign * (Number.isNaN(difference) ? a.localeCompare(b, "en") : difference);
}

function sort(heading) {
  const at = heading.cellIndex;
  const body = heading.closest("table").tBodies[0];
  const rising = heading.getAttribute("aria-sort") !== "ascending";
  for (const other of heading.parentNode.cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", rising ? "ascending" : "descending");
  const keyed = [...body.rows].map((row) => [row.cells[at].dataset.sort ?? row.cells[at].textContent, row]);
  keyed.sort(([a], [b]) => compare(a, b, rising ? 1 : -1));
  body.append(...keyed.map(([, row]) => row));
}

for (const heading of document.querySelectorAll(".sortable thead th")) {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...heading.childNodes);
  button.addEventListener("click", () => sort(heading));
  heading.append(button);
}
form.hidden = false;
form.addEventListener("input", remember);
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("reset", () => setTimeout(remember));
addEventListener("hashchange", recall);
for (const link of document.querySelectorAll('.tiles a, #matrix a')) {
  link.addEventListener("click", () => document.getElementById("listed").scrollIntoView());
}
recall();
