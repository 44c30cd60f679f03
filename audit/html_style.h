// What: style and script of the page. The script shows a <title> at once beside the pointer, where
//       browsers would wait a second.
#pragma once

namespace carrel::audit {

inline constexpr char kPageStyle[] = R"css(
:root { --ink: #14202b; --soft: #5a6773; --line: #dde3e8; --blue: #1f5f99; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--ink);
  font: 14px/1.45 system-ui, -apple-system, "Segoe UI", "Liberation Sans", Arial, sans-serif;
  font-variant-numeric: tabular-nums; }
main { max-width: 1232px; margin: 0 auto; padding: 28px 24px 48px; }
h1 { font-size: 30px; line-height: 1.15; margin: 0 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 0 0 4px; }
h3 { font-size: 13px; font-weight: 600; color: var(--soft); margin: 0; }
p { margin: 0; }
section { border-top: 1px solid var(--line); padding-top: 20px; margin-top: 26px; }
.kicker { color: var(--blue); font-weight: 600; margin-bottom: 2px; }
.shape { color: var(--soft); }
.shape b { color: var(--ink); font-weight: 600; }
.lead { max-width: 900px; margin-top: 8px; color: var(--soft); }
header .lead { color: var(--ink); }
.tiles { display: grid; grid-template-columns: repeat(5, 1fr); gap: 14px; }
.tile { border: 1px solid var(--line); border-radius: 6px; padding: 12px 14px; }
.tile .big { font-size: 27px; font-weight: 600; line-height: 1.3; }
.tile p { font-size: 12.5px; }
.at { white-space: nowrap; }
.note { color: var(--soft); margin-top: 4px; }
.maps { display: flex; flex-wrap: wrap; gap: 22px; margin-top: 16px; }
figure { margin: 0; }
figcaption b { display: block; font-size: 13.5px; }
figcaption span { display: block; color: var(--soft); font-size: 12px; }
.map svg { display: block; margin-top: 4px; }
.tick { font-size: 11px; fill: var(--soft); }
.cell { font-size: 11.5px; pointer-events: none; }
.kinds { font-size: 12px; color: var(--soft); margin: 6px 0 0 30px; }
.kinds i { display: inline-block; width: 11px; height: 11px; margin: 0 5px 0 8px;
  border: 1px solid #b9c4cd; }
.curves { display: grid; grid-template-columns: 1fr 1fr; gap: 22px 24px; margin-top: 16px; }
.curve svg { display: block; width: 100%; height: auto; }
.grid { stroke: #edf0f3; }
.axis { stroke: #8b97a2; }
.name { font-size: 12px; fill: var(--ink); }
.line { fill: none; stroke: var(--blue); stroke-width: 2.4; }
.thin { fill: none; stroke: #b8c2ca; stroke-width: 1; }
.thindot { fill: #b8c2ca; }
.dot { fill: var(--blue); stroke: #fff; stroke-width: 1.2; }
.judged { fill: #fff; stroke: var(--blue); stroke-width: 3; }
.label { font-size: 11.5px; fill: var(--ink); paint-order: stroke; stroke: #fff;
  stroke-width: 3px; }
.exact { stroke: #a4631b; stroke-dasharray: 4 4; }
.exactdot { fill: #a4631b; }
.exactname { font-size: 11.5px; fill: #8a5012; paint-order: stroke; stroke: #fff;
  stroke-width: 3px; }
table { border-collapse: collapse; width: 100%; margin-top: 12px; font-size: 13px; }
th { text-align: right; font-weight: 600; color: var(--soft); font-size: 12px; line-height: 1.25;
  vertical-align: bottom; padding: 4px 8px; border-bottom: 1px solid #8b97a2; }
td { text-align: right; padding: 4px 8px; border-bottom: 1px solid var(--line); }
th.text, td.text { text-align: left; }
tr.below td { background: #fdf1de; }
.verdict { margin-top: 14px; padding: 8px 14px; font-weight: 600; border-left: 4px solid; }
.missed { background: #fdf1de; border-color: #a4631b; }
.reached { background: #eaf2f9; border-color: var(--blue); }
dl { display: grid; grid-template-columns: 110px 1fr; gap: 6px 16px; margin: 10px 0 0;
  max-width: 1000px; }
dt { font-weight: 600; color: var(--soft); }
dd { margin: 0; }
#tip { position: absolute; display: none; white-space: pre-line; max-width: 420px; z-index: 1;
  background: var(--ink); color: #fff; font-size: 12px; padding: 7px 10px; border-radius: 4px;
  pointer-events: none; }
@media (max-width: 1000px) {
  .tiles { grid-template-columns: repeat(2, 1fr); }
  .curves { grid-template-columns: 1fr; }
  table { display: block; overflow-x: auto; }
}
@media print { section { break-inside: avoid; } }
)css";

inline constexpr char kPageScript[] = R"js(
(function () {
  var tip = document.createElement('div');
  tip.id = 'tip';
  document.body.appendChild(tip);
  document.querySelectorAll('svg title').forEach(function (title) {
    title.parentNode.setAttribute('data-tip', title.textContent);
    title.parentNode.setAttribute('aria-label', title.textContent);
    title.remove();
  });
  document.addEventListener('mousemove', function (event) {
    var over = event.target.closest ? event.target.closest('[data-tip]') : null;
    tip.style.display = over ? 'block' : 'none';
    if (!over) return;
    tip.textContent = over.getAttribute('data-tip');
    var right = window.scrollX + document.documentElement.clientWidth - tip.offsetWidth - 8;
    tip.style.left = Math.min(event.pageX + 14, right) + 'px';
    tip.style.top = event.pageY + 16 + 'px';
  });
})();
)js";

}  // namespace carrel::audit
