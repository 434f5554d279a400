// The one player: shows frame t of a view. No build, no network, no kernel; it draws nothing of its own.
//
//   data.runs[i]     {name, line, start, frames, question}: one for each entry of the drop-down; data.run is the first
//   run.frames[t]    {marks, say, alt}: indices into data.marks, the sentence, the picture in words
//   run.question     {step, reveal, text, options, right, why}: nothing behind `step` is put into the page
//                    before the reader has chosen, skipped, or the teacher has opened a later frame
//
// Keys, while the player has the focus: arrows, Home, End, Space, 1 to 9 answer, R reveals, P projector.

export function mount(el, data) {
  let run, q, last, at, open, chosen, timer, projector = data.projector;

  const make = (tag, name, parent, text = "") => {
    const made = document.createElement(tag);
    made.className = "kw-" + name;
    made.textContent = text;
    parent.append(made);
    return made;
  };
  const button = (name, parent, text, label, act) => {
    const made = make("button", name, parent, text);
    made.type = "button";
    made.setAttribute("aria-label", label);
    made.addEventListener("click", act);
    return made;
  };

  const root = make("section", "root", el);
  root.tabIndex = 0;
  root.setAttribute("aria-label", data.title);
  const bar = make("div", "bar", root);
  make("strong", "title", bar, data.title);
  const runs = make("select", "runs", bar);
  runs.setAttribute("aria-label", "run");
  runs.hidden = data.runs.length < 2;
  data.runs.forEach((one, i) => runs.append(new Option(one.name, i)));
  runs.addEventListener("change", () => choose(Number(runs.value)));
  button("reset", bar, "↺", "back to the opening frame", () => start());
  const back = button("back", bar, "◀", "one step back", () => go(at - 1));
  const play = button("play", bar, "▶▶", "play", () => (timer ? stop() : go_on()));
  const next = button("next", bar, "▶", "one step on", () => go(at + 1));
  const slider = make("input", "slider", bar);
  Object.assign(slider, { type: "range", min: 0, step: 1 });
  slider.setAttribute("aria-label", "step");
  slider.addEventListener("input", () => go(Number(slider.value)));
  const count = make("span", "count", bar);
  const large = button("large", bar, "P", "projector mode", () => { projector = !projector; show(); });
  const before = make("p", "before", root);
  const now = make("p", "now", root);
  now.setAttribute("aria-live", "polite");
  const after = make("p", "after", root);
  const picture = make("div", "picture", root);
  const ask = make("div", "ask", root);
  make("p", "legend", root, data.legend);
  const line = make("code", "line", root);

  const limit = () => (q && !open ? q.step : last);
  const stop = () => { clearInterval(timer); timer = undefined; show(); };
  const go_on = () => {
    timer = setInterval(() => (!root.isConnected || at >= limit() ? stop() : go(at + 1)), 1200);
    show();
  };
  const go = (step) => { at = Math.max(0, Math.min(limit(), step)); show(); };
  const start = () => {
    clearInterval(timer);
    timer = chosen = undefined;
    open = !q || run.start > q.step;
    at = run.start;
    ask.replaceChildren();
    show();
    if (ask.contains(document.activeElement) || document.activeElement === document.body) root.focus();
  };
  const choose = (i) => {
    run = data.runs[i];
    q = run.question;
    last = run.frames.length - 1;
    runs.value = i;
    start();
  };
  // One discrete step: from the question to the frame that answers it. -1: revealed without a choice.
  const commit = (option) => {
    open = true;
    chosen = option;
    stop();
    go(q.reveal);
    root.focus();
  };

  function show() {
    const frame = run.frames[at];
    picture.innerHTML = data.svg + frame.marks.map((i) => data.marks[i]).join("") + "</svg>";
    picture.firstElementChild.setAttribute("aria-label", frame.alt);
    const asking = q && !open && at === q.step;
    before.textContent = at > 0 ? "before: " + run.frames[at - 1].say : "";
    after.textContent = at < limit() ? "next: " + run.frames[at + 1].say : "";
    const verdict = q && open && at === q.reveal && chosen !== undefined ? judge() : "";
    const said = frame.say + (verdict ? " " + verdict : "");
    if (now.textContent !== said) now.textContent = said;
    slider.max = limit();
    slider.value = at;
    slider.setAttribute("aria-valuetext", `step ${at}: ${frame.say}`);
    count.textContent = asking ? `step ${at}: your turn` : `step ${at} / ${q && !open ? "?" : last}`;
    const held = document.activeElement;  // a disabled button would drop the focus, and the keys with it
    back.disabled = at === 0;
    next.disabled = play.disabled = at >= limit();
    if (held && held.disabled && root.contains(held)) root.focus();
    play.textContent = timer ? "❚❚" : "▶▶";
    play.setAttribute("aria-label", timer ? "pause" : "play");
    large.setAttribute("aria-pressed", projector);
    root.classList.toggle("kw-projector", projector);
    line.textContent = run.line && run.line.slice(0, -1) + (run.line.endsWith("...)") ? "" : `, step=${at}`) + ")";
    if (Boolean(asking) !== Boolean(ask.childElementCount)) asking ? question() : ask.replaceChildren();
  }

  function question() {
    make("p", "text", ask, q.text).setAttribute("role", "status");
    q.options.forEach((option, i) =>
      button("option", ask, `${i + 1}: ${option}`, `answer ${i + 1}: ${option}`, () => commit(i)));
    button("skip", ask, "R: show it", "show the answer without choosing", () => commit(-1));
  }

  function judge() {
    const said = chosen < 0 ? "" : `You said: ${q.options[chosen]}. ${chosen === q.right ? "Right." : "Not so."} `;
    return said + q.why;
  }

  // Marks of one block light up together: in the pool, the queue and the tables.
  picture.addEventListener("pointerover", (event) => {
    const group = event.target.closest("[data-link]");
    for (const other of picture.querySelectorAll("[data-link]")) {
      other.classList.toggle("kw-linked", Boolean(group) && other.dataset.link === group.dataset.link);
    }
  });

  root.addEventListener("keydown", (event) => {
    event.stopPropagation();  // a notebook in command mode would act on them
    if (event.ctrlKey || event.metaKey || event.altKey || event.target === runs) return;
    const asking = ask.childElementCount > 0;
    const onButton = event.target.tagName === "BUTTON" && (event.key === " " || event.key === "Enter");
    const digit = Number(event.key);
    const act = onButton ? undefined
      : event.key === "ArrowRight" ? () => go(at + 1)
      : event.key === "ArrowLeft" ? () => go(at - 1)
      : event.key === "Home" ? () => go(0)
      : event.key === "End" ? () => go(limit())
      : event.key === " " ? () => (timer ? stop() : go_on())
      : event.key === "p" || event.key === "P" ? () => { projector = !projector; show(); }
      : asking && (event.key === "r" || event.key === "R") ? () => commit(-1)
      : asking && digit >= 1 && digit <= q.options.length ? () => commit(digit - 1)
      : undefined;
    if (act) {
      event.preventDefault();
      act();
    }
  });

  choose(data.run);
  return () => clearInterval(timer);
}

export default { render: ({ model, el }) => mount(el, model.get("data")) };
