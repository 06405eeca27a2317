"""The style sheet of the report: system fonts, light and dark, fit for print; no other files."""

STYLE = """
:root { --ink: #1b1f24; --soft: #57606a; --rule: #c8ced6; --page: #ffffff; --card: #f5f7f9;
  --good: #1a7f37; --notice: #9a6700; --bad: #cf222e }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #9ba5b1; --rule: #454d57;
  --page: #14171b; --card: #1d2127; --good: #3fb950; --notice: #d29922; --bad: #f85149 } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1.25rem 4rem }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 }
h2 { font-size: 1.15rem; margin: 2.75rem 0 .25rem }
p { margin: .25rem 0 .75rem; max-width: 46rem }
.sub, .note, section > p, caption { color: var(--soft) }
.sub { overflow-wrap: anywhere }
.verdict { border-left: .4rem solid var(--tone); background: var(--card); border-radius: .4rem;
  padding: 1rem 1.25rem; margin: 1.25rem 0 }
.verdict p { margin: 0; max-width: none; color: var(--ink); font-size: 1.1rem }
.verdict b { color: var(--tone) }
.verdict .more { margin-top: .4rem; font-size: 1rem; color: var(--soft) }
.good { --tone: var(--good) } .notice { --tone: var(--notice) } .bad { --tone: var(--bad) }
.warning { border-left: .4rem solid var(--notice); padding: .25rem 1.25rem .25rem 2.25rem;
  margin: 1.25rem 0 }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: .75rem;
  margin: 0 }
.tiles div { background: var(--card); border-radius: .4rem; padding: .75rem 1rem;
  display: flex; flex-direction: column }
.tiles dt { order: 1; font-weight: 600; font-size: .9rem }
.tiles dd { margin: 0; font-size: 1.7rem; font-variant-numeric: tabular-nums; line-height: 1.2 }
.tiles .note { order: 2; font-size: .85rem }
figure { margin: .75rem 0 0; overflow-x: auto }
figure svg { display: block; width: 100%; min-width: 40rem; height: auto }
figure text { font-family: inherit !important }
details { margin-top: .75rem }
summary { cursor: pointer; color: var(--soft) }
.scroll { overflow-x: auto }
table { border-collapse: collapse; margin-top: .5rem; font-size: .9rem;
  font-variant-numeric: tabular-nums }
caption { text-align: left; padding-bottom: .25rem }
th, td { padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--rule); text-align: right;
  white-space: nowrap }
th:first-child { text-align: left }
thead th { color: var(--soft); font-weight: 600 }
tbody th { font-weight: 400 }
@media print { main { max-width: none } section { break-inside: avoid } }
"""
