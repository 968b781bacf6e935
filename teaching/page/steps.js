// The page: choose a scene and its options, then step through it.
//
// A scene is {name, title, open(), controls(choice), load(choice)}.  `controls` lists {name, label, options}, each option
// a value and its text; options may depend on the choices before.  `load` gives a view, {steps, show(step, stage, side),
// status(step)}: steps are 0 to `steps`.  A view may have `detach()`, called before another takes its place.

const sceneList = [];
const current = { scene: null, choice: {}, view: null, step: 0, timer: null, loading: 0 };
const byId = (id) => document.getElementById(id);

function addScene(scene) {
  sceneList.push(scene);
}

function openPage() {
  for (const scene of sceneList) {
    byId("scenes").append(html("button", { type: "button", "data-scene": scene.name, click: () => choose(scene, {}) }, scene.title));
  }
  const moves = { first: () => 0, back: () => current.step - 1, next: () => current.step + 1, last: () => current.view.steps };
  for (const [id, target] of Object.entries(moves)) {
    byId(id).addEventListener("click", () => goTo(target()));
  }
  byId("play").addEventListener("click", togglePlay);
  byId("position").addEventListener("input", (event) => goTo(Number(event.target.value)));
  byId("speed").addEventListener("change", () => current.timer && play());
  document.addEventListener("keydown", hearKey);
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  window.addEventListener("resize", () => current.view && showStep());
  window.addEventListener("hashchange", followAddress);
  followAddress();
}

/** Open what the address names: a scene, its choices, and a step. */
function followAddress() {
  if (location.hash === current.address) return;
  const choice = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const scene = sceneList.find((each) => each.name === choice.scene) || sceneList[0];
  choose(scene, choice, Number(choice.step) || 0);
}

/** Show a scene; choices missing in `wanted` keep their values, or take the first option. */
async function choose(scene, wanted, step = 0) {
  const number = (current.loading += 1);
  stop();
  await scene.open();
  const known = { ...(current.scene === scene ? current.choice : scene.first), ...wanted };
  const choice = {};
  const controls = [];
  for (let index = 0; index < scene.controls(choice).length; index += 1) {
    const control = scene.controls(choice)[index];
    const values = control.options.map(([value]) => value);
    choice[control.name] = nearest(known[control.name], values);
    controls.push(control);
  }
  const view = await scene.load(choice);
  if (number !== current.loading) return; // another choice came in between
  if (current.view && current.view.detach) current.view.detach();
  const before = current.scene;
  Object.assign(current, { scene, choice, view });
  showControls(controls);
  for (const button of byId("scenes").children) {
    button.setAttribute("aria-current", button.dataset.scene === scene.name ? "page" : "false");
  }
  byId("position").max = view.steps;
  if (before !== scene) byId("stage").scrollLeft = 0;
  goTo(step);
}

/** Return a value, or of numbers the nearest, or else the first. */
function nearest(value, values) {
  if (values.includes(value)) return value;
  const distance = (other) => Math.abs(Number(other) - Number(value)) || 0;
  return values.reduce((best, other) => (distance(other) < distance(best) ? other : best));
}

function showControls(controls) {
  const focused = document.activeElement && document.activeElement.name;
  const change = (name) => (value) => choose(current.scene, { [name]: value });
  byId("controls").replaceChildren(
    ...controls.map(({ name, label, options }) => labelledSelect(name, label, options, current.choice[name], change(name))),
  );
  if (focused && byId("controls").elements[focused]) byId("controls").elements[focused].focus();
}

function goTo(step) {
  current.step = Math.max(0, Math.min(step, current.view.steps));
  showStep();
}

function showStep() {
  const { view, step, scene, choice } = current;
  view.show(step, byId("stage"), byId("side"));
  byId("position").value = step;
  byId("status").textContent = view.status(step);
  byId("position").setAttribute("aria-valuetext", view.status(step));
  for (const id of ["first", "back"]) byId(id).disabled = step === 0;
  for (const id of ["next", "last"]) byId(id).disabled = step === view.steps;
  current.address = `#${new URLSearchParams({ scene: scene.name, ...choice, step })}`;
  history.replaceState(null, "", current.address);
  document.body.dataset.shown = current.address; // for tests: all of it is on the page
}

function togglePlay() {
  if (current.timer) stop();
  else play();
}

function play() {
  stop();
  if (current.step === current.view.steps) goTo(0);
  current.timer = setInterval(() => {
    goTo(current.step + 1);
    if (current.step === current.view.steps) stop();
  }, Number(byId("speed").value));
  showPlaying(true);
}

function stop() {
  clearInterval(current.timer);
  current.timer = null;
  showPlaying(false);
}

function showPlaying(playing) {
  byId("play").textContent = playing ? "Pause" : "Play";
  byId("play").setAttribute("aria-pressed", String(playing));
}

/** Step by the keyboard, unless the focused element uses the key itself. */
function hearKey(event) {
  const { target, key } = event;
  if (event.altKey || event.ctrlKey || event.metaKey || !current.view) return;
  if (target.matches("select, input, textarea")) return;
  if (key === " " && target.matches("button, summary, a, [role=button]")) return;
  const targets = { ArrowRight: current.step + 1, ArrowLeft: current.step - 1, Home: 0, End: current.view.steps };
  if (key in targets) {
    stop();
    goTo(targets[key]);
  } else if (key === " ") togglePlay();
  else return;
  event.preventDefault();
}
