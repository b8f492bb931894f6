// The paper's pictures of attention, live: the words read above, the words written below, and
// lines between them as strong as the weights. Where the words do not fit into two rows, they stand
// in two columns.

const SVG = "http://www.w3.org/2000/svg";
const FONT = "15px system-ui, sans-serif";
const [PADDING, GAP, HEIGHT, ROW, BETWEEN] = [8, 4, 26, 30, 170];
const LEAST = 0.02; // weaker lines are not drawn
const measure = document.createElement("canvas").getContext("2d");

// A token as it is shown: "▁" marks where SentencePiece begins a word.
export function shown(token) {
  if (token === "</s>") return "<EOS>";
  return token.replace(/^▁(?=.)/u, "").replace(/\s/gu, "␣") || "␣";
}

export const percent = (weight) => `${Math.round(100 * weight)} %`;

function element(name, attributes, parent) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent.append(made);
  return made;
}

function fitted(text, width) {
  measure.font = FONT;
  let cut = text;
  while (cut.length > 1 && measure.measureText(cut).width > width) {
    cut = `${cut.replace(/…$/u, "").slice(0, -1)}…`;
  }
  return { text: cut, width: measure.measureText(cut).width + 2 * PADDING };
}

// Where each word of [read, written] stands, and where its lines end.
function placed(sides, width) {
  const boxes = sides.map((tokens) => tokens.map((token) => fitted(shown(token), width / 3)));
  const lengths = boxes.map((row) => row.reduce((sum, box) => sum + box.width + GAP, -GAP));
  const rows = Math.max(...lengths) <= width;
  boxes.forEach((side, below) => {
    let x = (width - Math.min(lengths[below], width)) / 2;
    const widest = Math.max(...side.map((box) => box.width));
    side.forEach((box, number) => {
      if (rows) {
        Object.assign(box, { x, y: below ? HEIGHT + BETWEEN : 0 });
        box.end = [x + box.width / 2, below ? box.y - 2 : HEIGHT + 2];
        x += box.width + GAP;
      } else {
        box.x = below ? width - widest : widest - box.width;
        box.y = number * ROW;
        box.end = [below ? box.x - 2 : widest + 2, box.y + HEIGHT / 2];
      }
    });
  });
  const most = Math.max(...sides.map((tokens) => tokens.length));
  return { boxes, rows, height: rows ? 2 * HEIGHT + BETWEEN : most * ROW };
}

export class Picture {
  // `says` gets a sentence about the word that is looked at, or nothing.
  constructor(svg, says) {
    Object.assign(this, { svg, says, sides: null });
    new ResizeObserver(() => requestAnimationFrame(() => {
      if (svg.parentElement.clientWidth !== this.width) this.draw();
    })).observe(svg.parentElement);
    svg.addEventListener("keydown", (event) => this.move(event));
  }

  // `weights[written][read]`.
  show(read, written, weights) {
    Object.assign(this, { sides: [read, written], weights });
    this.draw();
  }

  weight(side, number, other) {
    return side ? this.weights[number][other] : this.weights[other][number];
  }

  // What a word looks at, or for which words it is read, strongest first.
  sentence(side, number) {
    const others = this.sides[1 - side]
      .map((token, other) => [this.weight(side, number, other), shown(token)])
      .filter(([weight]) => weight >= LEAST)
      .sort(([a], [b]) => b - a)
      .slice(0, 5)
      .map(([weight, token]) => `${token} (${percent(weight)})`);
    const word = `“${shown(this.sides[side][number])}”`;
    if (!others.length) return `${word} is hardly looked at.`;
    return `${word} ${side ? "looks at" : "is looked at by"} ${others.join(", ")}.`;
  }

  draw() {
    const width = this.width = this.svg.parentElement.clientWidth;
    if (!this.sides || !width) return;
    const focused = this.svg.contains(document.activeElement) ? this.at : null;
    this.svg.replaceChildren();
    const { boxes, rows, height } = placed(this.sides, width);
    this.rows = rows;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    this.lines = [];
    this.weights.forEach((row, written) => row.forEach((weight, read) => {
      if (weight < LEAST) return;
      const [[x1, y1], [x2, y2]] = [boxes[0][read].end, boxes[1][written].end];
      const line = element("line", { x1, y1, x2, y2, "stroke-width": 0.75 + 4 * weight }, this.svg);
      this.lines.push({ line, ends: [read, written], weight });
    }));
    this.words = boxes.map((side, below) => side.map((box, number) => this.word(box, below, number)));
    const [side, number] = focused ?? [1, 0];
    const start = this.words[side][number] ?? this.words[1][0];
    start.group.setAttribute("tabindex", 0);
    if (focused) start.group.focus();
    else this.look(null);
  }

  word(box, side, number) {
    const { x, y, width } = box;
    const name = `${side ? "Written" : "Read"}, ${number + 1} of ${this.sides[side].length}`;
    const group = element("g", {
      class: "word", tabindex: -1, role: "img", "aria-label": `${name}: ${this.sentence(side, number)}`,
    }, this.svg);
    const mark = element("rect", { class: "mark", x, y, width, height: HEIGHT, rx: 4, opacity: 0 }, group);
    element("rect", { x, y, width, height: HEIGHT, rx: 4 }, group);
    const text = element("text", { x: x + PADDING, y: y + HEIGHT / 2 }, group);
    text.textContent = box.text;
    group.addEventListener("pointerenter", () => this.look([side, number]));
    group.addEventListener("pointerleave", () => this.look(this.focused()));
    group.addEventListener("focus", () => this.focus([side, number]));
    group.addEventListener("blur", () => this.look(null));
    return { group, mark };
  }

  focused() {
    return this.svg.contains(document.activeElement) ? this.at : null;
  }

  focus(at) {
    this.at = at;
    for (const { group } of this.words.flat()) group.setAttribute("tabindex", -1);
    this.words[at[0]][at[1]].group.setAttribute("tabindex", 0);
    this.look(at);
  }

  // Shows the lines of a word, or of all.
  look(at) {
    for (const { line, ends, weight } of this.lines) {
      const mine = !at || ends[at[0]] === at[1];
      line.setAttribute("stroke-opacity", mine ? Math.min(1, 0.12 + weight) : 0.04);
    }
    this.words.forEach((words, side) => words.forEach(({ group, mark }, number) => {
      const self = at && side === at[0] && number === at[1];
      group.classList.toggle("at", Boolean(self));
      mark.setAttribute("opacity", at && side !== at[0] ? this.weight(side, number, at[1]) : 0);
    }));
    this.says(at ? this.sentence(...at) : "");
  }

  // Arrow keys: along a side, or across to the word of the strongest line.
  move(event) {
    const [back, on, toRead, toWritten] = this.rows
      ? ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"]
      : ["ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight"];
    const at = this.focused();
    if (!at) return;
    let [side, number] = at;
    const last = this.sides[side].length - 1;
    if (event.key === back) number = Math.max(0, number - 1);
    else if (event.key === on) number = Math.min(last, number + 1);
    else if (event.key === "Home") number = 0;
    else if (event.key === "End") number = last;
    else if (event.key === (side ? toRead : toWritten)) {
      const weights = this.sides[1 - side].map((_, other) => this.weight(side, number, other));
      [side, number] = [1 - side, weights.indexOf(Math.max(...weights))];
    } else if (event.key !== toRead && event.key !== toWritten) return;
    event.preventDefault();
    this.words[side][number].group.focus();
  }
}
