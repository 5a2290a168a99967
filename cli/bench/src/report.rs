//! One HTML page with everything: no scripts, nothing to fetch.

use crate::{
    Error, Results,
    plots::{self, Plot},
    tables::{self, Rows},
};

/// How it looks: light by itself, dark where the reader's machine is.
const STYLE: &str = "
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; }
p { max-width: 46rem; }
table { border-collapse: collapse; font-size: .85rem; display: block; overflow-x: auto; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #8884; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1rem 0; background: #fff; border-radius: .4rem; }
figure svg { width: 100%; height: auto; display: block; }
.missed { color: #c33; font-weight: 600; }
.met { color: #292; }
";

/// The page, with `plots` that are [those of the results](plots::all).
///
/// # Errors
/// When a plot cannot be drawn.
pub fn html(results: &Results, plots: &[Plot]) -> Result<String, Error> {
    let environment = &results.environment;
    let mut body = format!(
        "<h1>farside: benchmark</h1>\n<p>{}, farside {}</p>\n",
        escape(&environment.date),
        escape(&environment.sources())
    );
    body += &format!("<h2>Targets</h2>\n{}", lines(&tables::targets(results)));
    let figure = |name: &str| -> Result<String, Error> {
        let named = plots.iter().filter(|plot| plot.name == name);
        named
            .map(|plot| Ok(format!("<figure>{}</figure>\n", plot.svg()?)))
            .collect()
    };
    if !results.jobs.is_empty() {
        let [borrowed, beside] = &results.disks;
        body += &format!(
            "<h2>fio: {} over {}</h2>\n",
            escape(borrowed),
            escape(beside)
        );
        body += &format!("<p>{}</p>\n", escape(tables::HOW_TO_READ));
        body += &figure("fio-ratios")?;
        body += &table(&tables::job_ratios(results));
        body += "<h3>Medians of each disk</h3>\n";
        body += &table(&tables::job_figures(results));
    }
    for section in &results.sections {
        body += &format!("<h2>{}</h2>\n", escape(&section.title));
        body += &format!("<p>{}</p>\n", escape(&section.about));
        for plot in plots::of_section(section) {
            body += &figure(&plot.name)?;
        }
        body += &table(&tables::section(section));
    }
    body += "<h2>Where and with what</h2>\n";
    let mut rows = vec![vec!["what".to_owned(), "value".to_owned()]];
    let facts = environment.facts().into_iter();
    rows.extend(facts.map(|(what, value)| vec![what.to_owned(), value]));
    let options = environment.options.iter();
    rows.extend(options.map(|(option, value)| vec![option.clone(), value.clone()]));
    body += &table(&rows);
    body += &format!("<h2>How to read it</h2>\n<p>{}</p>\n", escape(READING));
    Ok(format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n\
         <title>farside: benchmark</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}</body>\n\
         </html>\n"
    ))
}

const READING: &str = "What is compared was measured in turns, one right after the other, so that \
whatever else the machine did it did to both; a ratio is of such neighbours. A figure is the median \
of its repeats, with the least and the most of them: two figures differ when these ranges do not \
touch. A target is judged by the median. In plots of dots a line reaches from the least to the most; \
a box is from the first to the third quartile with the median in it, and its lines reach to the first \
and the 99th percentile. Figures of one machine say little about another's; where the guest's \
instructions are emulated (tcg), everything that the guest itself does is many times slower than on \
hardware.";

fn table(rows: &Rows) -> String {
    let mut html = "<table>\n".to_owned();
    for (at, row) in rows.iter().enumerate() {
        let tag = if at == 0 { "th" } else { "td" };
        html += "<tr>";
        for cell in row {
            let class = match cell {
                cell if cell.contains("missed") => " class=\"missed\"",
                cell if cell == "met" || cell.ends_with(": met") => " class=\"met\"",
                _ => "",
            };
            html += &format!("<{tag}{class}>{}</{tag}>", escape(cell));
        }
        html += "</tr>\n";
    }
    html + "</table>\n"
}

fn lines(text: &str) -> String {
    let lines = text
        .lines()
        .map(|line| format!("{}<br>\n", escape(line.trim())));
    format!("<p>{}</p>\n", lines.collect::<String>())
}

fn escape(text: &str) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        match c {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            _ => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plots::tests::results;

    #[test]
    fn the_page_has_everything_and_needs_nothing() {
        let mut results = results();
        results.environment.cpu = "A <CPU>".into();
        results
            .environment
            .options
            .insert("repeats".into(), "5".into());
        let plots = plots::all(&results);
        let page = html(&results, &plots).unwrap();
        assert_eq!(page.matches("<svg").count(), plots.len());
        for wanted in [
            "<td>randread-4k-qd1</td>",
            "class=\"missed\">missed: IOPS, bandwidth, p99<",
            "About &lt;all&gt;.",
            "A &lt;CPU&gt;",
            "<td>repeats</td><td>5</td>",
        ] {
            assert!(page.contains(wanted), "{wanted} is not in {page}");
        }
        for absent in ["<script", "src=", "href=", "@import", "url("] {
            assert!(!page.contains(absent), "{absent} is in the page");
        }
    }
}
