// The values of the point nearest to the pointer. The page shows everything else without a script.
const NEAR = 20; // units of the drawing, of which a figure is about 390 wide

function pointsOf(group) {
  const marks = [...group.querySelectorAll("use")].map(mark => [mark.getAttribute("x"), mark.getAttribute("y")]);
  const line = group.querySelector("path")?.getAttribute("d") ?? "";
  const points = marks.length ? marks : [...line.matchAll(/[ML] (\S+) (\S+)/g)].map(found => [found[1], found[2]]);
  return points.map(([x, y]) => ({x: Number(x), y: Number(y), label: group.dataset.series}));
}

function valueAt(share, [first, last, isLogarithmic]) {
  const value = isLogarithmic ? first * (last / first) ** share : first + (last - first) * share;
  return String(Number(value.toPrecision(4)));
}

for (const svg of document.querySelectorAll(".view svg:has([data-axes])")) {
  const axes = svg.querySelector("[data-axes]"), ends = JSON.parse(axes.dataset.axes);
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  svg.parentElement.append(tip);
  let points;
  svg.addEventListener("pointermove", event => {
    points ??= [...svg.querySelectorAll("[data-series]")].flatMap(pointsOf);
    const toScreen = svg.getScreenCTM(), box = axes.querySelector("path").getBBox();
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(toScreen.inverse());
    const inside = points.filter(({x, y}) => x >= box.x && x <= box.x + box.width && y >= box.y && y <= box.y + box.height);
    const nearest = inside.reduce((best, point) => {
      const distance = Math.hypot(point.x - at.x, point.y - at.y);
      return distance < best.distance ? {point, distance} : best;
    }, {distance: NEAR}).point;
    tip.hidden = !nearest;
    if (!nearest) return;
    const x = valueAt((nearest.x - box.x) / box.width, ends.x), y = valueAt(1 - (nearest.y - box.y) / box.height, ends.y);
    tip.textContent = `${nearest.label}: ${ends.categories[Math.round(x)] ?? x}, ${y}`;
    const place = svg.parentElement.getBoundingClientRect(), screen = new DOMPoint(nearest.x, nearest.y).matrixTransform(toScreen);
    const half = tip.offsetWidth / 2;
    tip.style.left = `${Math.min(Math.max(screen.x - place.x, half), place.width - half)}px`;
    tip.style.top = `${screen.y - place.y}px`;
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; });
}
