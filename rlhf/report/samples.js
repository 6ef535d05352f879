"use strict";
(() => {
  // Marks the words of a text that are not in the longest common subsequence with another text.
  const markChanges = (box, other, name = "mark") => {
    const old = other.match(/\s*\S+/g) ?? [], now = box.textContent.match(/\s*\S+/g) ?? [];
    if (!now.length || other === box.textContent || old.length * now.length > 1e6) return;
    const same = (i, j) => old[i].trim() === now[j].trim();
    const longest = Array.from({length: old.length + 1}, () => new Array(now.length + 1).fill(0));
    for (let i = old.length - 1; i >= 0; i--) {
      for (let j = now.length - 1; j >= 0; j--) {
        longest[i][j] = same(i, j) ? longest[i + 1][j + 1] + 1 : Math.max(longest[i + 1][j], longest[i][j + 1]);
      }
    }
    box.replaceChildren();
    for (let i = 0, j = 0; j < now.length;) {
      if (i < old.length && same(i, j)) {
        box.append(now[j++]);
        i++;
      } else if (i < old.length && longest[i + 1][j] >= longest[i][j + 1]) i++;
      else box.appendChild(document.createElement(name)).append(now[j++]);
    }
  };
  // Returns "Hi." for the prompt "Human: Hi. Assistant:"; other prompts keep all their words.
  const question = (prompt) => prompt.trim().match(/^Human: ((?:(?!\nHuman: )[^])*?)\s*Assistant:$/)?.[1] ?? prompt.trim();
  for (const pair of document.querySelectorAll(".changed .prompt")) {
    const [before, after] = pair.querySelectorAll(".text");
    const text = before.textContent;
    markChanges(before, after.textContent, "del");
    markChanges(after, text);
  }

  const data = document.getElementById("samples");
  if (!data) return;
  const sources = JSON.parse(data.textContent); // samples by title; the first title is that of the held-out prompts
  const [source, browser, find, sort, everyStep, step, stepName, shade, count, histogram] =
    ["source", "browser", "find", "sort", "every-step", "step", "step-name", "shade", "count", "histogram"]
      .map((id) => document.getElementById(id));
  const BINS = 12;
  const element = (name, className, text) => {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const fill = (select, names) => select.replaceChildren(...names.map(([name, value]) => new Option(name, value)));

  // Shows the answers of the selected source, of all steps or of askedStep.
  const browse = (askedStep) => {
    const samples = sources[source.value];
    const isHeldOut = source.selectedIndex === 0; // in other sources, each step has different prompts
    const shows = (key) => samples.some((sample) => sample[key] !== undefined);
    const prompts = new Map();
    for (const sample of samples) {
      if (!prompts.has(sample.prompt)) prompts.set(sample.prompt, []);
      prompts.get(sample.prompt).push(sample);
    }
    for (const answers of prompts.values()) answers.sort((a, b) => a.step - b.step);

    // The last answer of the actor itself: after the last step, the average of its weights answers too.
    const last = (answers) => answers.findLast((answer) => answer.model !== "actor_ema");
    const gain = (key) => (answers) => (last(answers)[key] ?? 0) - (answers[0][key] ?? 0);
    const orders = {
      [isHeldOut ? "as evaluated" : "as sampled"]: null,
      "lowest score": (answers) => last(answers).score,
      "highest score": (answers) => -last(answers).score,
      "largest gain in score": (answers) => -gain("score")(answers),
      "longest answer": (answers) => -last(answers).response.length,
      ...(shows("kl") ? {"largest KL": (answers) => -(last(answers).kl ?? 0)} : {}),
      ...(shows("gold") ? {
        "lowest gold": (answers) => last(answers).gold,
        "score up, gold down": (answers) => gain("gold")(answers) - gain("score")(answers),
      } : {}),
    };
    fill(sort, Object.keys(orders).map((name) => [name, name]));
    const steps = [...new Set(samples.map((sample) => sample.step))].sort((a, b) => a - b);
    step.max = steps.length - 1;
    step.value = askedStep === undefined ? steps.length - 1 : steps.indexOf(askedStep);
    everyStep.checked = isHeldOut && askedStep === undefined;
    const largest = largestByKey(samples);
    fill(shade, [["nothing", ""], ...TOKEN_ROWS.filter(({key, of}) => !of && largest.get(key) > 0).map(({name, key}) => [name, key])]);

    // The columns with an answer's numbers.
    const columns = {
      step: (sample) => sample.model === "actor_ema" ? `${sample.step}, average` : sample.step,
      score: (sample) => cut(sample.score),
      ...(shows("gold") ? {gold: (sample) => cut(sample.gold)} : {}),
      ...(shows("kl") ? {KL: (sample) => cut(sample.kl)} : {}),
      ...(shows("tokens") ? {tokens: (sample) => sample.tokens} : {}),
    };

    // Returns an element with the response's text; with shading, each token's background shows its value.
    const textOf = (sample) => {
      const key = shade.value;
      if ((!key || !sample[key]) && sample.turns) {
        const said = element("span", "text", "");
        for (const turn of sample.turns) {
          const words = turn.role === "assistant" ? turn.text : `${turn.role}: ${turn.text}`;
          said.append(element("span", turn.role === "assistant" ? "turn" : "turn observed", words));
        }
        return said;
      }
      if (!key || !sample[key]) return element("span", "text", sample.response);
      const text = element("span", "text", "");
      sample.token_texts.forEach((token, place) => {
        const value = sample[key][place];
        const part = element("span", "", token);
        shadeToken(part, value, largest.get(key));
        part.title = cut(value, 3);
        text.append(part);
      });
      return text;
    };

    // Draws a histogram of the scores at the step; pressing a bar shows only the prompts with such scores.
    let chosen = null;
    let bin = () => 0;
    const atStep = (answers) => everyStep.checked ? [last(answers)] :
      answers.filter((answer) => answer.step === steps[step.value] && answer.model !== "actor_ema");
    const drawHistogram = () => {
      const scores = [...prompts.values()].flatMap(atStep).map((answer) => answer.score);
      const low = Math.min(...scores);
      const width = (Math.max(...scores) - low) / BINS || 1;
      bin = (score) => Math.min(BINS - 1, Math.floor((score - low) / width));
      const counts = Array.from({length: BINS}, (_, index) => scores.filter((score) => bin(score) === index).length);
      const most = Math.max(1, ...counts);
      histogram.replaceChildren(...counts.map((number, index) => {
        const bar = element("button", "bar");
        const from = (low + index * width).toFixed(2);
        const to = (low + (index + 1) * width).toFixed(2);
        bar.title = `${number} with scores from ${from} to ${to}`;
        bar.setAttribute("aria-label", bar.title);
        bar.setAttribute("aria-pressed", "false");
        bar.append(element("span", "number", number || ""), element("span", "fill"), element("span", "edge", from));
        bar.style.setProperty("--share", number / most);
        bar.addEventListener("click", () => {
          chosen = chosen === index ? null : index;
          [...histogram.children].forEach((each, place) => each.setAttribute("aria-pressed", String(place === chosen)));
          show();
        });
        return bar;
      }));
    };

    const opened = new Set(); // prompts whose tokens are shown
    const tokensButton = (prompt) => {
      const button = element("button", "", "Tokens");
      button.setAttribute("aria-expanded", String(opened.has(prompt)));
      button.addEventListener("click", () => {
        if (!opened.delete(prompt)) opened.add(prompt);
        show();
        document.getElementById(button.id).focus(); // the page has a new button
      });
      return button;
    };

    // The table of a prompt's answers: words that the answer of an earlier step lacks are marked.
    const answerTable = (prompt, answers) => {
      const table = element("table", "answers");
      const head = table.createTHead().insertRow();
      for (const name of [...Object.keys(columns), "answer"]) head.append(element("th", "", name));
      const body = table.createTBody();
      let before = null;
      for (const answer of answers) {
        const row = body.insertRow();
        for (const read of Object.values(columns)) row.append(element("td", "number", read(answer)));
        const cell = row.appendChild(element("td", "text"));
        const isSame = before?.response === answer.response && !shade.value;
        cell.append(isSame ? element("span", "same", "the same") : textOf(answer));
        if (before && before.step < answer.step && !isSame && !shade.value && !answer.turns) markChanges(cell, before.response);
        if (!answer.ended) cell.append(element("span", "same", " (never ended)"));
        if (opened.has(prompt)) {
          const tokens = body.insertRow().appendChild(element("td"));
          tokens.colSpan = head.cells.length;
          tokens.append(tokenTable(answer, largest));
        }
        before = answer;
      }
      return table;
    };

    const show = () => {
      step.disabled = everyStep.checked;
      stepName.textContent = everyStep.checked ? "all" : steps[step.value];
      step.setAttribute("aria-valuetext", `step ${steps[step.value]}`);
      const wanted = find.value.toLowerCase();
      const order = orders[sort.value];
      let found = [...prompts].filter(([prompt, answers]) =>
        (everyStep.checked || answers.some((answer) => answer.step === steps[step.value])) &&
        (chosen === null || atStep(answers).some((answer) => bin(answer.score) === chosen)) &&
        [prompt, ...answers.map((answer) => answer.response)].join("\n").toLowerCase().includes(wanted));
      if (order) found = found.sort((a, b) => order(a[1]) - order(b[1]));
      count.textContent = `${found.length} of ${prompts.size} prompts`;
      browser.replaceChildren(...found.slice(0, 100).map(([prompt, answers], place) => {
        const card = element("article", "prompt");
        const shown = answers.filter((answer) => everyStep.checked || answer.step === steps[step.value]);
        card.append(element("h3", "", question(prompt)), answerTable(prompt, shown));
        if (answers.some((answer) => answer.token_texts)) {
          card.append(tokensButton(prompt));
          card.lastChild.id = `tokens-${place}`;
        }
        return card;
      }));
    };
    const showStep = () => {
      chosen = null;
      drawHistogram();
      show();
    };
    find.oninput = sort.onchange = shade.onchange = show;
    step.oninput = everyStep.onchange = showStep;
    showStep();
  };
  source.onchange = () => browse();
  for (const link of document.querySelectorAll("a[data-step]")) {
    link.onclick = () => {
      source.selectedIndex = 0;
      browse(Number(link.dataset.step));
    };
  }
  browse();
})();
