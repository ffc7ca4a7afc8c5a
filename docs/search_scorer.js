// Sphinx's scores, but a name of easydist itself comes before the same name of a class in one of its modules, and the
// pages about the design come last.
var Scorer = {
  score: ([page, title, anchor, description, score, file, kind]) => {
    if (page.startsWith("design/")) return score - 10;
    return kind === "object" ? score - 2 * (title.split(".").length - 2) : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
