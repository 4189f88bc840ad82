"""Report style: the page's one sheet, light and dark, print included."""

STYLE = """
:root{--ink:#1d2329;--muted:#5d6873;--grid:#e3e7eb;--paper:#fff;--page:#f6f7f8;--blue:#2f6db3;
--orange:#d9822b;--green:#3d8f6a;--violet:#7a62b8;--red:#c23b3b;color-scheme:light dark}
@media (prefers-color-scheme:dark){:root{--ink:#e6e9ec;--muted:#9aa5b0;--grid:#333b43;--paper:#1b2026;
--page:#14181c;--blue:#6ea8e0;--orange:#e8a25c;--green:#6fbf9a;--violet:#a796dc;--red:#e57373}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.55 system-ui,-apple-system,"Segoe UI",
Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1040px;margin:0 auto;padding:40px 20px 64px}
header{margin-bottom:24px}
header p{margin:0;color:var(--muted)}
.brand{text-transform:uppercase;letter-spacing:.08em;font-size:12px}
h1{margin:2px 0 4px;font-size:28px;line-height:1.2;overflow-wrap:anywhere}
h2{margin:0 0 6px;font-size:17px}
section{background:var(--paper);border:1px solid var(--grid);border-radius:10px;padding:18px 20px;
margin-bottom:18px}
section>p{margin:0 0 10px;color:var(--muted);max-width:75ch}
figure{margin:0}
svg{display:block;width:100%;height:auto}
svg text{font-family:inherit!important}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(138px,1fr));gap:18px}
.card p{margin:0;color:var(--muted);font-size:13px}
.card b{display:block;font-size:20px;font-weight:600;white-space:nowrap}
.card small{color:var(--muted)}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:18px;
margin-bottom:18px}
.pair section{margin:0}
.scroll{overflow:auto;max-height:430px;border:1px solid var(--grid);border-radius:6px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:13px}
th,td{padding:4px 10px;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}
th{position:sticky;top:0;background:var(--paper);color:var(--muted);font-weight:500}
code,pre{font:12px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
pre{overflow:auto;margin:10px 0 0}
summary{cursor:pointer;font-weight:600}
ul{margin:0;padding-left:20px;color:var(--muted)}
li{margin-bottom:4px;max-width:85ch}
@media print{body{background:#fff}section{break-inside:avoid}.scroll{max-height:none}}
""".strip()
"""CSS; the variables are those that `figures.VARIABLES` names."""
