// Plots as SVG elements, made without any markup in strings.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 80;

function shape(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) {
    element.setAttribute(key, value);
  }
  return element;
}

function canvas(name) {
  return shape("svg", {
    class: name, viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true",
  });
}

// Lines from 0 to the largest of all values; null leaves a gap.
// series: [{ name: "first" | "second", values: [number | null, ...] }, ...], of `slots` values at most.
export function lines(series, slots) {
  const plot = canvas("plot");
  const largest = Math.max(0, ...series.flatMap((one) => one.values.filter((value) => value !== null)));
  for (const { name, values } of series) {
    let points = [];
    const flush = () => {
      if (points.length === 1) {
        points.push(points[0].map((value, axis) => (axis ? value : value + 1)));
      }
      if (points.length) {
        plot.append(shape("polyline", { class: name, points: points.map((one) => one.join()).join(" ") }));
      }
      points = [];
    };
    values.forEach((value, at) => {
      if (value === null) {
        flush();
        return;
      }
      const x = ((slots - values.length + at) / Math.max(1, slots - 1)) * WIDTH;
      points.push([x.toFixed(1), (HEIGHT - 2 - (largest ? value / largest : 0) * (HEIGHT - 6)).toFixed(1)]);
    });
    flush();
  }
  return plot;
}

// A bar for each value, from 0 to the largest.
export function bars(name, values, slots) {
  const plot = canvas("plot");
  const largest = Math.max(0, ...values);
  const width = WIDTH / slots;
  values.forEach((value, at) => {
    const height = largest ? Math.max(1, (value / largest) * (HEIGHT - 4)) : 1;
    plot.append(shape("rect", {
      class: name, x: (slots - values.length + at) * width, y: HEIGHT - height, width: width * 0.8, height,
    }));
  });
  return plot;
}

// The parts of KV memory that requests use and that only the prefix cache holds.
export function memoryMap(used, cached, total) {
  const plot = canvas("map");
  if (total) {
    const scale = WIDTH / total;
    plot.append(shape("rect", { class: "used", x: 0, y: 0, width: used * scale, height: HEIGHT }));
    plot.append(shape("rect", { class: "cached", x: used * scale, y: 0, width: cached * scale, height: HEIGHT }));
  }
  return plot;
}
