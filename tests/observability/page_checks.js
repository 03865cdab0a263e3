// What a page must keep at every width and in both color schemes. Each function returns a list of what breaks it.
(() => {
  const seen = node => node.checkVisibility({visibilityProperty: true}) && node.getClientRects().length > 0 && !node.closest(".cards thead");
  const parse = color => { const found = color.match(/[\d.]+/g).map(Number); return found.length < 4 ? [...found, 1] : found; };
  const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  function background(node) {
    const layers = [];
    for (let at = node; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, top) => over(top, below), matchMedia("(prefers-color-scheme: dark)").matches ? [0, 0, 0, 1] : [255, 255, 255, 1]);
  }
  const light = color => { const [r, g, b] = color.slice(0, 3).map(value => value / 255).map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const contrast = (one, two) => { const [a, b] = [light(one), light(two)].sort((x, y) => y - x); return (a + 0.05) / (b + 0.05); };
  const opacity = node => { let found = 1; for (let at = node; at; at = at.parentElement) found *= +getComputedStyle(at).opacity; return found; };
  const name = node => `${node.tagName.toLowerCase()}.${node.getAttribute("class") || ""} ${node.textContent.trim().slice(0, 30)}`;
  const texts = () => { const found = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) { const node = walk.currentNode.parentElement; if (walk.currentNode.data.trim() && !["SCRIPT", "STYLE", "NOSCRIPT", "OPTION", "TITLE", "title"].includes(node.tagName) && seen(node)) found.push(node); } return [...new Set(found)]; };
  window.checks = {
    contrast: () => texts().flatMap(node => {
      const style = getComputedStyle(node), below = background(node), ink = parse(node.closest("svg") ? style.fill : style.color);
      const found = contrast(over([ink[0], ink[1], ink[2], ink[3] * opacity(node)], below), below);
      return found < 4.5 ? [`${name(node)} ${found.toFixed(2)}`] : [];
    }),
    lines: () => [...document.querySelectorAll("svg .line:not(.faint)")].filter(seen).flatMap(node => {
      const found = contrast(parse(getComputedStyle(node).stroke), background(node.closest("figure") || node.parentElement));
      return found < 3 ? [`${node.getAttribute("class")} ${found.toFixed(2)}`] : [];
    }),
    size: () => texts().filter(node => node.closest("svg")).flatMap(node => {
      const picture = node.closest("svg"), scale = picture.getBoundingClientRect().width / picture.viewBox.baseVal.width, found = parseFloat(getComputedStyle(node).fontSize) * scale;
      return found < 10 ? [`${name(node)} ${found.toFixed(1)} px`] : [];
    }),
    cut: () => {
      const wide = document.documentElement.clientWidth, found = [];
      if (document.documentElement.scrollWidth > wide) found.push(`page ${document.documentElement.scrollWidth} > ${wide}`);
      for (const node of texts()) {
        const box = node.getBoundingClientRect(), picture = node.closest("svg");
        if (box.left < -0.5 || box.right > wide + 0.5) found.push(`${name(node)} outside of the window: ${box.left} to ${box.right}`);
        if (picture) { const around = picture.getBoundingClientRect(); if (box.left < around.left - 1.5 || box.right > around.right + 1.5 || box.top < around.top - 1.5 || box.bottom > around.bottom + 1.5) found.push(`${name(node)} outside of its picture`); }
        for (let at = node; at; at = at.parentElement) if (getComputedStyle(at).overflowX !== "visible" && at.scrollWidth > at.clientWidth + 1 && at !== document.documentElement) found.push(`${name(at)} cut off`);
      }
      return [...new Set(found)];
    },
    overlap: () => [...document.querySelectorAll("figure svg")].filter(seen).flatMap(picture => {
      const boxes = [...picture.querySelectorAll("text")].map(node => [node, node.getBoundingClientRect()]);
      return boxes.flatMap(([one, a], at) => boxes.slice(at + 1).flatMap(([two, b]) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1 ? [`${name(one)} on ${name(two)}`] : []));
    }),
    // A number is not broken over lines.
    broken: () => [...document.querySelectorAll("td.n, dd, .legend b, .stages b")].filter(seen).flatMap(node => {
      const inside = document.createRange();
      inside.selectNodeContents(node);
      return inside.getBoundingClientRect().height > 1.8 * parseFloat(getComputedStyle(node).fontSize) ? [name(node)] : [];
    }),
    // Lines of a chart, as drawn and as the legend shows them: the same, and no two alike.
    legends: () => [...document.querySelectorAll("figure.chart, figure.histogram")].flatMap(figure => {
      const look = node => `${getComputedStyle(node).stroke} ${node.getAttribute("stroke-dasharray") || ""}`;
      const drawn = [...figure.querySelectorAll(":scope > svg .line:not(.faint)")].map(look), keys = [...figure.querySelectorAll(".legend .key .line")].map(look), title = figure.querySelector("figcaption").textContent;
      return [...(JSON.stringify(drawn) === JSON.stringify(keys) ? [] : [`${title}: ${keys} for ${drawn}`]), ...(new Set(keys).size === keys.length ? [] : [`${title}: two alike`])];
    }),
    controls: () => [...document.querySelectorAll("a[href], button, input, select, summary, [onclick]")].filter(seen).filter(node => node.type !== "radio" || node.checked).length + [...document.querySelectorAll("svg[tabindex]")].filter(seen).length,
    names: () => [...document.querySelectorAll("a[href], button, input, select")].filter(seen).filter(node => !(node.textContent.trim() || node.getAttribute("aria-label") || node.labels?.length)).map(name),
  };
})();
