(() => {
  "use strict";

  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const digits = (number) => number.toFixed(number < 9.995 ? 2 : number < 99.95 ? 1 : 0);

  function bytes(amount) {
    let power = 0;
    while (power < 5 && Math.round(amount) >= 1024) { amount /= 1024; power += 1; }
    return power ? `${digits(amount)} ${units[power]}` : `${Math.round(amount)} B`;
  }

  function seconds(amount) {
    if (!amount) return "0 s";
    for (const [unit, size] of [["ns", 1e-9], ["us", 1e-6], ["ms", 1e-3]]) {
      if (Number(digits(amount / size)) < 1000) return `${digits(amount / size)} ${unit}`;
    }
    return `${digits(amount)} s`;
  }

  /** An element with a class, attributes and children; texts are never markup. */
  function make(tag, name, attributes = {}, ...children) {
    const made = document.createElement(tag);
    if (name) made.className = name;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  /** What a value is, with its extents below. */
  function twoLines(title) {
    const cut = title.lastIndexOf(", ");
    return cut < 0 ? [title]
      : [title.slice(0, cut), make("span", "ro-sub", {}, title.slice(cut + 2))];
  }

  const chip = (fate) => make("span", `ro-chip ro-${fate.replace(" ", "-")}`, {}, fate);

  // ------------------------------------------------------------------------ memory over time

  function chart(figure, told, data) {
    const plot = figure.querySelector(".ro-plot");
    const panel = figure.querySelector(".ro-alive");
    const count = told.at.length;
    const totals = told.at.map((_, moment) =>
      told.bands.reduce((sum, band) => sum + band[moment], 0));
    const peak = totals.indexOf(Math.max(...totals));
    const caption = figure.querySelector("figcaption").textContent;
    let shown = peak;
    let pointed = false;

    const pictures = [...plot.querySelectorAll("svg")].map((svg) => {
      const at = Object.fromEntries(
        ["left", "right", "ceiling", "floor"].map((key) => [key, Number(svg.dataset[key])]));
      const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
      cursor.setAttribute("class", "ro-cursor");
      cursor.setAttribute("y1", at.ceiling);
      cursor.setAttribute("y2", at.floor);
      svg.append(cursor);
      // The picture's own text would show as a tooltip over the details beside it.
      for (const title of svg.querySelectorAll("title")) title.remove();
      return { svg, at, cursor };
    });

    const swatch = (kind) => make("span", "ro-swatch", {
      style: `background:${data.kinds[kind][0]}`,
    });

    function show(moment, isPointed = true) {
      pointed = isPointed;
      shown = Math.max(0, Math.min(count - 1, moment));
      for (const { at, cursor } of pictures) {
        const x = at.left + (shown + 0.5) / count * (at.right - at.left);
        cursor.style.display = pointed ? "" : "none";
        cursor.setAttribute("x1", x);
        cursor.setAttribute("x2", x);
      }
      const there = told.arrays
        .filter(([, , , first, last]) => first <= shown && shown <= last)
        .sort((one, other) => other[2] - one[2])
        .slice(0, 6);
      const where = shown === peak ? "At the peak: " : "";
      const doing = `step ${(told.at[shown] + 1).toLocaleString("en")} of ` +
        `${told.steps.toLocaleString("en")}, ${told.phases[shown]}: ` +
        data.texts[told.values[shown]];
      const lines = there.map(([title, kind, size]) => make("li", "",
        { title: data.kinds[kind][1] }, swatch(kind),
        make("span", "ro-name", {}, ...twoLines(data.texts[title])),
        make("span", "ro-num", {}, bytes(size))));
      const rest = totals[shown] - there.reduce((sum, one) => sum + one[2], 0);
      if (rest > 0) {
        lines.push(make("li", "ro-sub", {}, make("span"), make("span", "", {}, "and others"),
          make("span", "ro-num", {}, bytes(rest))));
      }
      const compiled = told.compiled.map((line) => line.length
        ? `, as compiled ${bytes(line[Math.floor(shown * line.length / count)])}` : "").join("");
      panel.replaceChildren(
        make("p", "ro-moment", {}, make("b", "", {}, `${where}${bytes(totals[shown])}${compiled}`),
          make("span", "ro-sub", {}, doing)),
        make("ul", "", {}, ...lines));
      const kinds = data.kinds.map(([, label], kind) => [label, told.bands[kind][shown]])
        .filter(([, size]) => size > 0).map(([label, size]) => `${label} ${bytes(size)}`);
      plot.setAttribute("aria-valuenow", shown + 1);
      plot.setAttribute("aria-valuetext",
        `${bytes(totals[shown])}; ${doing}; ${kinds.join(", ")}`);
    }

    for (const [key, value] of Object.entries({
      tabindex: 0, role: "slider", "aria-valuemin": 1, "aria-valuemax": count,
      "aria-label": `Memory over time. ${caption}`,
    })) plot.setAttribute(key, value);
    plot.addEventListener("pointermove", (event) => {
      const { svg, at } = pictures.find((one) => one.svg.clientWidth) ?? pictures[0];
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
      show(Math.floor((x - at.left) / (at.right - at.left) * count));
    });
    plot.addEventListener("pointerleave", () => {
      if (plot !== document.activeElement) show(peak, false);
    });
    plot.addEventListener("focus", () => show(shown));
    plot.addEventListener("blur", () => show(peak, false));
    plot.addEventListener("keydown", (event) => {
      const page = Math.max(1, Math.round(count / 10));
      const to = {
        ArrowRight: shown + 1, ArrowLeft: shown - 1, ArrowUp: shown + 1, ArrowDown: shown - 1,
        PageUp: shown + page, PageDown: shown - page, Home: 0, End: count - 1,
      }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      show(to);
    });
    show(peak, false);
  }

  // ------------------------------------------------------------------------------ the values

  // For each value: number, title, primitive, module, source, fate, region, times, bytes, seconds, why.
  const [, TITLE, PRIMITIVE, MODULE, SOURCE, FATE, REGION, TIMES, BYTES, SECONDS, WHY] =
    Array(11).keys();
  const cost = (value) => value[SECONDS] * Math.max(1, value[TIMES]);
  const rate = (value) => value[BYTES] ? cost(value) / (value[BYTES] / 2 ** 20) : 0;
  const ROW = 46;

  function why(value, data) {
    return data.why[value[WHY]].replace("{bytes}", bytes(value[BYTES]))
      .replace("{time}", seconds(cost(value))).replace("{rate}", seconds(rate(value)));
  }

  /** What another fate would cost or save, for each MiB. */
  function inShort(value, data) {
    const fate = data.fates[value[FATE]];
    if (fate === "not needed") return "not read backward";
    if (!value[BYTES]) return "takes no memory";
    const said = fate === "kept" ? "dropping costs" : "keeping saves";
    return `${said} ${seconds(rate(value))}/MiB`;
  }

  function table(holder, data) {
    const text = (value, field) => data.texts[value[field]];
    const where = (value) => [text(value, MODULE), text(value, SOURCE)].filter(Boolean).join(" · ");
    // Heading, class, width, sort key, and cell content.
    const columns = [
      ["value", "", "auto", (v) => text(v, TITLE), (v) => [
        make("b", "", { title: text(v, TITLE) }, text(v, TITLE)),
        make("span", "ro-sub", { title: where(v) }, where(v)),
      ]],
      ["fate", "", "124px", (v) => v[FATE], (v) => [chip(data.fates[v[FATE]])]],
      ["bytes", "ro-num", "92px", (v) => v[BYTES], (v) => [bytes(v[BYTES])]],
      ["to recompute", "ro-num ro-optional", "122px", cost, (v) => [seconds(cost(v))]],
      ["why", "ro-num ro-optional", "206px", rate, (v) => [inShort(v, data)]],
      ["region", "ro-num ro-optional", "84px", (v) => v[REGION], (v) => [String(v[REGION] + 1)]],
    ];
    let sorted = 2;
    let down = true;
    let rows = [];
    let active = 0;

    const filter = make("input", "", {
      type: "search", placeholder: "Filter by name, module, line or primitive",
      "aria-label": "Filter values",
    });
    const fates = make("select", "", { "aria-label": "Fate" },
      make("option", "", { value: "" }, "all fates"),
      ...data.fates.map((fate, number) => make("option", "", { value: number }, fate)));
    const said = make("span", "ro-sub", { role: "status" });
    const heads = columns.map(([heading, name, width], number) => {
      const button = make("button", "", { type: "button" }, heading);
      button.addEventListener("click", () => {
        down = sorted === number ? !down : number > 1 && number < 5;
        sorted = number;
        refresh();
      });
      return make("th", name, { scope: "col", style: width === "auto" ? "" : `width:${width}` },
        button);
    });
    const body = make("tbody");
    const scroll = make("div", "ro-scroll", {
      tabindex: 0, role: "region", "aria-label": "Values: arrow keys move from one to the next",
    }, make("table", "ro-table", {}, make("thead", "", {}, make("tr", "", {}, ...heads)), body));
    const detail = make("div", "ro-detail", { "aria-live": "polite" });
    const order = new Intl.Collator("en", { numeric: true }).compare;
    const words = data.values.map((value) =>
      [TITLE, PRIMITIVE, MODULE, SOURCE].map((field) => text(value, field)).join(" ")
        .toLowerCase());

    function refresh() {
      const wanted = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      const key = columns[sorted][3];
      rows = data.values.map((value, number) => [key(value), value, number])
        .filter(([, value, number]) =>
          (fates.value === "" || value[FATE] === Number(fates.value)) &&
          wanted.every((word) => words[number].includes(word)));
      rows.sort(typeof rows[0]?.[0] === "string"
        ? (one, other) => order(one[0], other[0]) : (one, other) => one[0] - other[0]);
      if (down) rows.reverse();
      heads.forEach((head, number) => {
        if (number !== sorted) head.removeAttribute("aria-sort");
        else head.setAttribute("aria-sort", down ? "descending" : "ascending");
      });
      const total = rows.reduce((sum, [, value]) => sum + value[BYTES], 0);
      said.textContent = `${rows.length.toLocaleString("en")} of ` +
        `${data.values.length.toLocaleString("en")} values, ${bytes(total)}`;
      scroll.scrollTop = 0;
      select(0);
    }

    /** Writes the visible rows, and space in place of the others. */
    function draw() {
      const first = Math.max(0, Math.floor(scroll.scrollTop / ROW) - 5);
      const last = Math.min(rows.length, first + Math.ceil(scroll.clientHeight / ROW) + 10);
      const space = (count) => make("tr", "ro-space", { "aria-hidden": "true" },
        make("td", "", { style: `height:${count * ROW}px` }));
      const parts = first ? [space(first)] : [];
      for (let place = first; place < last; place += 1) {
        const value = rows[place][1];
        const row = make("tr", "", {
          "data-row": place, "aria-selected": String(place === active), "aria-rowindex": place + 2,
        }, ...columns.map(([, name, , , cells]) => make("td", name, {}, ...cells(value))));
        parts.push(row);
      }
      if (last < rows.length) parts.push(space(rows.length - last));
      if (!rows.length) {
        parts.push(make("tr", "", {}, make("td", "ro-sub", { colspan: 3 },
          "No value matches.")));
      }
      body.replaceChildren(...parts);
    }

    function select(place) {
      active = Math.max(0, Math.min(rows.length - 1, place));
      draw();
      if (!rows.length) { detail.replaceChildren(); return; }
      const value = rows[active][1];
      detail.replaceChildren(make("b", "", {}, text(value, TITLE)),
        ` (${text(value, PRIMITIVE)})`, make("br"), why(value, data), make("br"),
        make("span", "ro-sub", {}, where(value)));
    }

    filter.addEventListener("input", refresh);
    fates.addEventListener("change", refresh);
    scroll.addEventListener("scroll", draw, { passive: true });
    body.addEventListener("click", (event) => {
      const row = event.target.closest("[data-row]");
      if (row) select(Number(row.dataset.row));
    });
    scroll.addEventListener("keydown", (event) => {
      if (event.target !== scroll) return;
      const page = Math.max(1, Math.floor(scroll.clientHeight / ROW) - 2);
      const to = {
        ArrowDown: active + 1, ArrowUp: active - 1, PageDown: active + page, PageUp: active - page,
        Home: 0, End: rows.length - 1,
      }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      const place = Math.max(0, Math.min(rows.length - 1, to));
      const head = body.parentNode.tHead.offsetHeight;
      if (place * ROW < scroll.scrollTop) scroll.scrollTop = place * ROW;
      const below = (place + 1) * ROW + head - scroll.clientHeight;
      if (below > scroll.scrollTop) scroll.scrollTop = below;
      select(place);
    });
    body.parentNode.setAttribute("aria-rowcount", data.values.length + 1);
    holder.replaceChildren(make("div", "ro-controls", {}, filter, fates, said), scroll, detail);
    refresh();
    new ResizeObserver(draw).observe(scroll);
  }

  // ------------------------------------------------------------------------------ the program

  function tree(holder, data) {
    const known = new Map(data.values.map((value) => [value[0], value]));
    holder.addEventListener("toggle", (event) => {
      const node = event.target;
      if (!node.open || !node.dataset.values) return;
      const numbers = node.dataset.values.split(",").map(Number);
      delete node.dataset.values;
      const leaves = numbers.filter((number) => known.has(number)).map((number) => {
        const value = known.get(number);
        const fate = data.fates[value[FATE]];
        return make("div", "ro-leaf", { title: why(value, data) },
          make("span", `ro-name ro-${fate.replace(" ", "-")}`, {}, data.texts[value[TITLE]]),
          make("span", "ro-fate", {}, chip(fate)),
          make("span", "ro-num"),
          make("span", "ro-num", {}, bytes(value[BYTES])),
          make("span", "ro-num", {}, value[TIMES] ? seconds(cost(value)) : ""));
      });
      node.querySelector(".ro-inside").append(...leaves);
    }, true);
  }

  for (const host of document.querySelectorAll(".remat-opt:not([data-ready])")) {
    const held = host.querySelector(".ro-data");
    if (!held) continue;
    host.dataset.ready = "";
    const data = JSON.parse(held.textContent);
    host.querySelectorAll(".ro-chart").forEach((figure, number) =>
      chart(figure, data.charts[number], data));
    const values = host.querySelector(".ro-values");
    if (values) table(values, data);
    const program = host.querySelector(".ro-tree");
    if (program) tree(program, data);
  }
})();
