// Builds a table of an answer's tokens with PPO's values of each token, shaded by their size.
const TOKEN_ROWS = [
  {name: "reward", key: "token_rewards", hasSum: true, title: "the score at the last token, minus the KL penalty"},
  {name: "KL", key: "token_kl", hasSum: true, title: "log-probability of the policy minus that of the reference, nats"},
  {name: "ratio", key: "token_kl", of: Math.exp, title: "probability under the policy divided by that under the reference"},
  {name: "value", key: "token_values", title: "of the critic, before the token"},
  {name: "advantage", key: "token_advantages", title: "GAE, before whitening"},
];
// null stands for a number that was not finite; "-0.00" becomes "0.00"
const cut = (number, digits = 2) => number?.toFixed(digits).replace(/^-(?=[0.]*$)/, "") ?? "not a number";

// Returns the largest absolute value of each key among all samples; 0 for a key that none has.
const largestByKey = (samples) => new Map(TOKEN_ROWS.map(({key}) =>
  [key, samples.flatMap((sample) => sample[key] ?? []).reduce((most, value) => Math.max(most, Math.abs(value)), 0)]));

const shadeToken = (element, value, most) => {
  element.classList.add("token");
  element.classList.toggle("low", value < 0);
  element.style.setProperty("--shade", (Math.abs(value) / most).toFixed(3));
};

const tokenTable = (sample, largest) => {
  const region = document.createElement("div");
  region.className = "scroll";
  region.tabIndex = 0;
  region.setAttribute("role", "group");
  region.setAttribute("aria-label", `Tokens of the answer of step ${sample.step}`);
  const table = region.appendChild(document.createElement("table"));
  table.className = "tokens";
  const cell = (row, name, text) => {
    const made = row.appendChild(document.createElement(name));
    made.textContent = text;
    if (name === "th") made.scope = row.parentNode.nodeName === "THEAD" ? "col" : "row";
    return made;
  };
  const head = table.createTHead().insertRow();
  for (const text of ["", "sum", ...sample.token_texts]) {
    cell(head, text === "" ? "td" : "th", text.replaceAll(" ", "·").replaceAll("\n", "↵"));
  }
  const body = table.createTBody();
  for (const {name, key, hasSum, of, title} of TOKEN_ROWS) {
    if (!sample[key] || !largest.get(key)) continue;
    const row = body.insertRow();
    cell(row, "th", name).title = title;
    cell(row, "td", hasSum ? cut(sample[key].reduce((sum, value) => sum + value, 0)) : "");
    for (const value of sample[key]) {
      const made = cell(row, "td", cut(value === null || !of ? value : of(value)));
      shadeToken(made, value, largest.get(key));
    }
  }
  return region;
};
