// Tells the values of a chart where a reader points, touches, or steps with the arrow keys.
for (const figure of document.querySelectorAll("figure[data-readings]")) {
  const readings = JSON.parse(figure.dataset.readings);
  const told = figure.appendChild(document.createElement("div"));
  told.className = "told";
  told.setAttribute("role", "status");
  told.hidden = true;
  for (const svg of figure.querySelectorAll("svg[data-axes]")) {
    const places = JSON.parse(svg.dataset.axes);
    const line = svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "line"));
    line.setAttribute("class", "pointer");
    line.style.display = "none";
    let axes = 0, point = -1;
    const hide = () => { told.hidden = true; line.style.display = "none"; point = -1; };
    const show = (a, p) => {
      [axes, point] = [a, p];
      const { label, names, colours, points } = readings[a];
      const [x, words, values] = points[p];
      const [left, top, right, bottom, low, high] = places[a];
      const at = left + (x - low) / (high - low) * (right - left);
      for (const [name, value] of [["x1", at], ["x2", at], ["y1", top], ["y2", bottom]]) line.setAttribute(name, value);
      line.style.display = "";
      told.replaceChildren(Object.assign(document.createElement("b"), { textContent: `${label} ${words}`.trim() }));
      names.forEach((name, i) => {
        if (!values[i]) return;
        const row = told.appendChild(document.createElement("div"));
        row.appendChild(document.createElement("i")).style.background = `var(--${colours[i]})`;
        row.append(`${name} `, Object.assign(document.createElement("b"), { textContent: values[i] }));
      });
      told.hidden = false;
      const frame = figure.getBoundingClientRect(), drawn = svg.getBoundingClientRect();
      const scale = drawn.width / svg.viewBox.baseVal.width;
      const beside = drawn.left - frame.left + at * scale, above = drawn.top - frame.top + top * scale;
      const room = beside + 14 + told.offsetWidth <= frame.width;
      const narrow = frame.width < 500; // there it would cover the curves
      const shift = narrow ? -told.offsetWidth / 2 : room ? 14 : -14 - told.offsetWidth;
      told.style.left = `${Math.max(0, Math.min(beside + shift, frame.width - told.offsetWidth))}px`;
      told.style.top = `${narrow ? above - told.offsetHeight - 2 : above + 4}px`;
    };
    const nearest = (a, x) => {
      const distance = ([px]) => Math.abs(px - x);
      return readings[a].points.reduce((best, p, i, all) => distance(p) < distance(all[best]) ? i : best, 0);
    };
    const point_at = (event) => {
      const drawn = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / drawn.width;
      const x = (event.clientX - drawn.left) * scale, y = (event.clientY - drawn.top) * scale;
      const a = places.findIndex(([l, t, r, b]) => x >= l - 8 && x <= r + 8 && y >= t && y <= b);
      if (a < 0 || !readings[a].points.length) return hide();
      const [left, , right, , low, high] = places[a];
      show(a, nearest(a, low + (x - left) / (right - left) * (high - low)));
    };
    const step = (event) => {
      const all = readings.flatMap((reading, a) => reading.points.map((_, p) => [a, p]));
      const now = all.findIndex(([a, p]) => a === axes && p === point);
      const last = all.length - 1;
      const next = { ArrowRight: Math.min(now + 1, last), ArrowLeft: Math.max(now - 1, 0), Home: 0, End: last };
      if (event.key === "Escape") return hide();
      if (!(event.key in next) || last < 0) return;
      event.preventDefault();
      show(...all[next[event.key]]);
    };
    svg.tabIndex = 0;
    svg.addEventListener("pointermove", point_at);
    svg.addEventListener("pointerdown", point_at);
    svg.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && hide());
    svg.addEventListener("keydown", step);
    svg.addEventListener("blur", hide);
  }
}
