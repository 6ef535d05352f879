"use strict";
(() => {
  const data = document.getElementById("samples");
  if (!data) return;
  const samples = JSON.parse(data.textContent);
  const browser = document.getElementById("browser");
  const find = document.getElementById("find");
  const sort = document.getElementById("sort");
  const count = document.getElementById("count");

  const prompts = new Map();
  for (const sample of samples) {
    if (!prompts.has(sample.prompt)) prompts.set(sample.prompt, []);
    prompts.get(sample.prompt).push(sample);
  }
  for (const answers of prompts.values()) answers.sort((a, b) => a.step - b.step);

  const last = (answers) => answers[answers.length - 1];
  const gain = (key) => (answers) => (last(answers)[key] ?? 0) - (answers[0][key] ?? 0);
  const orders = {
    "as evaluated": null,
    "lowest score": (answers) => last(answers).score,
    "highest score": (answers) => -last(answers).score,
    "largest gain in score": (answers) => -gain("score")(answers),
    "longest answer": (answers) => -last(answers).response.length,
  };
  if (samples.some((sample) => sample.gold !== undefined)) {
    orders["lowest gold"] = (answers) => last(answers).gold;
    orders["score up, gold down"] = (answers) => gain("gold")(answers) - gain("score")(answers);
  }
  for (const name of Object.keys(orders)) sort.add(new Option(name));

  const element = (name, className, text) => {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const facts = (sample) => {
    const words = [`step ${sample.step}`, `score ${sample.score.toFixed(2)}`];
    if (sample.gold !== undefined) words.push(`gold ${sample.gold.toFixed(2)}`);
    if (!sample.ended) words.push("never ended");
    return words.join(", ");
  };
  const show = () => {
    const wanted = find.value.toLowerCase();
    const order = orders[sort.value];
    let found = [...prompts].filter(([prompt, answers]) =>
      [prompt, ...answers.map((answer) => answer.response)].join("\n").toLowerCase().includes(wanted));
    if (order) found = found.sort((a, b) => order(a[1]) - order(b[1]));
    count.textContent = `${found.length} of ${prompts.size} prompts`;
    browser.replaceChildren(...found.slice(0, 100).map(([prompt, answers]) => {
      const card = element("article", "prompt");
      card.append(element("h3", "", prompt.trim()));
      for (const answer of answers) {
        const row = element("div", "answer");
        row.append(element("span", "facts", facts(answer)), element("span", "text", answer.response));
        card.append(row);
      }
      return card;
    }));
  };
  find.addEventListener("input", show);
  sort.addEventListener("change", show);
  show();
})();
