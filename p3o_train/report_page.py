"""The page of ``p3o report``: one file, without scripts and without anything that is loaded from elsewhere."""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; --text: #1a1a1a; --page: #ffffff; --line: #c8c8c8; --note: #fff3d6; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e4e4; --page: #181a1b; --line: #4a4d50; --note: #4a3a12; }
}
body { font: 16px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem;
  color: var(--text); background: var(--page); }
table { border-collapse: collapse; }
.wide { overflow-x: auto; }
th, td { border-bottom: 1px solid var(--line); padding: 0.25rem 0.75rem; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
td, th, li { overflow-wrap: anywhere; }
/* drawn on white, in both schemes */
img { max-width: 100%; background: #ffffff; }
.warning { background: var(--note); padding: 0.1rem 0.5rem; margin: 0.4rem 0; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
{%- macro table(head, rows, kind) %}
<div class="wide"><table>
<thead><tr>{% for cell in head %}<th scope="col">{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>
{%- for row in rows %}
<tr><th scope="row">{{ row[0] }}</th>{% for cell in row[1:] %}<td class="{{ kind }}">{{ cell }}</td>{% endfor %}</tr>
{%- endfor %}
</tbody>
</table></div>
{%- endmacro %}
<h2>Runs</h2>
{{ table(["run", "directory", "method", "steps", "last step"], runs, "text") }}
<h2>Warnings</h2>
{%- for label, texts in warnings %}
<h3>{{ label }}</h3>
<ul>
{%- for text in texts %}
<li class="warning">{{ text }}</li>
{%- else %}
<li>nothing that is looked for</li>
{%- endfor %}
</ul>
{%- endfor %}
<p>Looked for: {{ looked_for }}.</p>
<h2>Final numbers</h2>
<p>Means over the last {{ last_steps }} steps, or as many as there are; {{ no_number }} where a run has no such
number.</p>
{{ table(["number"] + labels, numbers, "number") }}
<h2>Curves</h2>
<p><img src="data:image/png;base64,{{ picture }}" alt="{{ alt }}"></p>
{%- if notes %}
<ul>
{%- for note in notes %}
<li>{{ note }}</li>
{%- endfor %}
</ul>
{%- endif %}
<h2>Settings that differ</h2>
{%- if differing %}
{{ table(["setting"] + labels, differing, "text") }}
{%- else %}
<p>{{ nothing_differs }}</p>
{%- endif %}
<h2>Versions</h2>
{%- if versions %}
{{ table(["package"] + labels, versions, "text") }}
{%- else %}
<p>No run has a config.json that names them.</p>
{%- endif %}
<h2>All settings</h2>
{%- for label, settings in all_settings %}
<details><summary>{{ label }}</summary>
{%- if settings %}
{{ table(["setting", "value"], settings, "text") }}
{%- else %}
<p>The run directory has no config.json.</p>
{%- endif %}
</details>
{%- endfor %}
</body>
</html>
"""
