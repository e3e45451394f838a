"use strict";
// A list of prompts: sorted, searched, and each one opened when asked.

const SHOWN_AT_FIRST = 100;

/**
 * Bring the list of `section` to life. `name` and `text` are of the prompt at a place; `open(room, place)` fills the
 * room under a prompt when it is opened first.
 */
function promptList(section, { name, text, open }) {
  const list = section.querySelector(".prompts");
  const [by, direction, find, found] = ["sort", "direction", "find", "found"].map((one) => section.querySelector(`.${one}`));
  const rows = [...list.children];
  const texts = new Map();
  const all = make("button", { type: "button", class: "all", hidden: "" });
  list.after(all);
  let falling = true, most = SHOWN_AT_FIRST;

  const value = (row) => {
    if (by.value === "order") return -Number(row.dataset.place);
    return row.dataset[by.value] === "–" ? null : Number(row.dataset[by.value]);
  };
  const compare = (a, b) => {
    if (by.value === "id") return (falling ? 1 : -1) * name(a.dataset.place).localeCompare(name(b.dataset.place), undefined, { numeric: true });
    const [one, other] = [value(a), value(b)];
    if (one === null || other === null) return (one === null) - (other === null);  // missing ones last, either way
    return (falling ? other - one : one - other) || a.dataset.place - b.dataset.place;
  };
  const sort = () => {
    list.append(...rows.sort(compare));
    show();
  };
  const wanted = (row) => {
    const [asked, place] = [find.value.toLowerCase(), row.dataset.place];
    if (asked && !texts.has(place)) texts.set(place, `${name(place)}\n${text(place)}`.toLowerCase());
    return asked === "" || texts.get(place).includes(asked);
  };
  /** Show the rows that are asked for, at first not all of a long list; an open one stays. */
  const show = () => {
    let left = 0;
    for (const row of rows) row.hidden = !wanted(row) || (++left > most && !row.classList.contains("open"));
    found.textContent = left < rows.length ? `${left} of ${rows.length} prompts` : `${rows.length} prompts`;
    all.hidden = left <= most;
    all.textContent = `show all ${left} prompts`;
  };
  by.addEventListener("change", sort);
  direction.addEventListener("click", () => {
    falling = !falling;
    direction.textContent = falling ? "↓ falling" : "↑ rising";
    direction.setAttribute("aria-pressed", String(!falling));
    sort();
  });
  find.addEventListener("input", show);
  all.addEventListener("click", () => {
    most = Infinity;
    show();
  });
  list.addEventListener("click", (event) => {
    const button = event.target.closest("button[aria-controls]");
    if (button) turn(button, button.getAttribute("aria-expanded") === "false");
  });
  list.addEventListener("opening", (event) => turn(event.target.querySelector("button[aria-controls]"), true));

  function turn(button, opened) {
    const row = button.parentElement, room = byId(button.getAttribute("aria-controls"));
    row.classList.toggle("open", opened);
    button.setAttribute("aria-expanded", String(opened));
    room.hidden = !opened;
    if (opened) row.hidden = false;
    if (opened && !room.hasChildNodes()) open(room, row.dataset.place);
  }
  show();
}

/** Open the prompt that the address names, as in report.html#walk-3. */
function openFromAddress() {
  const row = byId(location.hash.slice(1))?.closest(".prompts > li");
  if (!row) return;
  row.dispatchEvent(new Event("opening", { bubbles: true }));
  row.scrollIntoView();
}
addEventListener("hashchange", openFromAddress);
