//! Draws plots on whatever plotters draws on.

use std::ops::Range;

use plotters::{
    coord::{Shift, types::RangedCoordf64},
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use super::{Kind, Plot, font};
use crate::{Axis, Error, Quantiles, Spread, Unit};

/// Colours that are distinguishable with colour blindness (Okabe and Ito).
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(90, 90, 90),
];
const GREY: RGBColor = RGBColor(120, 120, 120);

/// Room for the names of rows, pixels.
const NAMES: u32 = 230;
/// Height of a figure in a row, and of what is around all rows.
const FIGURE: u32 = 14;
const AROUND: u32 = 130;
/// Height of lines over something.
const LINES: u32 = 480;
/// From this range of figures on the scale is logarithmic.
const MANY: f64 = 50.0;

const TITLE: f64 = 20.0;
const TEXT: f64 = 14.0;

type Area<'a, DB> = DrawingArea<DB, Shift>;
type Outcome = Result<(), String>;

fn text<E: std::fmt::Display>(error: E) -> String {
    error.to_string()
}

fn colour(at: usize) -> RGBColor {
    COLOURS[at % COLOURS.len()]
}

impl Plot {
    /// Pixels.
    pub(super) fn height(&self) -> u32 {
        match &self.kind {
            Kind::Dots { legend, rows, .. } => {
                let legend = if legend.len() > 1 { 40 } else { 0 };
                AROUND + legend + row_height(&self.kind) * rows.len() as u32
            }
            Kind::Boxes { rows, .. } => AROUND + row_height(&self.kind) * rows.len() as u32,
            Kind::Lines { .. } => LINES,
        }
    }

    /// Draws it all.
    pub(super) fn draw<DB: DrawingBackend>(&self, root: &Area<'_, DB>) -> Result<(), Error> {
        let drawn = font::register().and_then(|()| {
            root.fill(&WHITE).map_err(text)?;
            let title = (font::NAME, TITLE).into_font().color(&BLACK);
            let area = root.titled(&self.title, title).map_err(text)?;
            match &self.kind {
                Kind::Dots { unit, legend, rows } => dots(&area, *unit, legend, rows),
                Kind::Boxes { unit, rows } => boxes(&area, *unit, rows),
                Kind::Lines { over, unit, lines } => curves(&area, over, *unit, lines),
            }?;
            root.present().map_err(text)
        });
        drawn.map_err(|what| self.error(what))
    }
}

fn row_height(kind: &Kind) -> u32 {
    match kind {
        Kind::Dots { legend, .. } => FIGURE * (legend.len() as u32).max(2) + 10,
        Kind::Boxes { .. } => 52,
        Kind::Lines { .. } => 0,
    }
}

fn show(unit: Option<Unit>) -> impl Fn(&f64) -> String {
    move |value| match unit {
        Some(unit) => unit.show(*value),
        None => format!("{value:.2}"),
    }
}

/// A little more than from the least to the most.
fn range(values: impl Iterator<Item = f64> + Clone) -> Range<f64> {
    let min = values.clone().fold(f64::INFINITY, f64::min);
    let max = values.fold(f64::NEG_INFINITY, f64::max);
    match max - min {
        span if span.is_finite() && span > 0.0 => (min - span * 0.05)..(max + span * 0.05),
        _ if min.is_finite() => (min - 1.0)..(min + 1.0),
        _ => 0.0..1.0,
    }
}

/// Whether a logarithmic scale shows them better.
fn wide(values: impl Iterator<Item = f64> + Clone) -> bool {
    let min = values.clone().fold(f64::INFINITY, f64::min);
    let max = values.fold(0.0, f64::max);
    min > 0.0 && min.is_finite() && max / min > MANY
}

/// Draws rows with their names on the left; `draw` is given the chart's scale
/// from a figure to pixels, and where each row is.
fn rows<DB: DrawingBackend>(
    area: &Area<'_, DB>,
    unit: Option<Unit>,
    names: &[&str],
    values: impl Iterator<Item = f64> + Clone,
    draw: impl Fn(&dyn Fn(f64, f64) -> (i32, i32)) -> Outcome,
) -> Outcome {
    let height = names.len() as f64;
    let mut builder = ChartBuilder::on(area);
    builder
        .margin(10)
        .margin_right(40)
        .set_label_area_size(LabelAreaPosition::Left, NAMES)
        .set_label_area_size(LabelAreaPosition::Bottom, 34);
    // Two types of chart, which only a macro can treat alike.
    macro_rules! chart {
        ($x:expr) => {{
            let mut chart = builder
                .build_cartesian_2d($x, RangedCoordf64::from(height..0.0))
                .map_err(text)?;
            chart
                .configure_mesh()
                .disable_y_mesh()
                .y_labels(0)
                .x_labels(8)
                .x_label_formatter(&show(unit))
                .label_style((font::NAME, TEXT))
                .light_line_style(WHITE)
                .axis_style(GREY)
                .draw()
                .map_err(text)?;
            let at = |x: f64, y: f64| chart.backend_coord(&(x, y));
            for (row, name) in names.iter().enumerate() {
                let style = (font::NAME, TEXT).into_font().color(&BLACK);
                let style = style.pos(Pos::new(HPos::Right, VPos::Center));
                let (_, y) = at(1.0, row as f64 + 0.5);
                put(area, &style, name, (NAMES as i32, y))?;
            }
            draw(&at)
        }};
    }
    match wide(values.clone()) {
        true => {
            let all = range(values.clone());
            let least = values.fold(f64::INFINITY, f64::min) * 0.8;
            chart!((least..all.end * 1.2).log_scale())
        }
        false => chart!(range(values)),
    }
}

/// Writes at a place in the backend's pixels.
fn put<DB: DrawingBackend>(
    area: &Area<'_, DB>,
    style: &TextStyle<'_>,
    words: &str,
    at: (i32, i32),
) -> Outcome {
    area.draw(&Text::new(
        words.to_owned(),
        relative(area, at),
        style.clone(),
    ))
    .map_err(text)
}

/// The backend's pixels in the area's own.
fn relative<DB: DrawingBackend>(area: &Area<'_, DB>, (x, y): (i32, i32)) -> (i32, i32) {
    let (left, top) = area.get_base_pixel();
    (x - left, y - top)
}

fn line<DB: DrawingBackend>(
    area: &Area<'_, DB>,
    from: (i32, i32),
    to: (i32, i32),
    style: ShapeStyle,
) -> Outcome {
    let ends = [relative(area, from), relative(area, to)];
    area.draw(&PathElement::new(ends, style)).map_err(text)
}

fn dots<DB: DrawingBackend>(
    area: &Area<'_, DB>,
    unit: Option<Unit>,
    legend: &[String],
    things: &[(String, Vec<Option<Spread>>)],
) -> Outcome {
    let area = match legend {
        [_, _, ..] => &key(area, legend)?,
        _ => area,
    };
    let names: Vec<&str> = things.iter().map(|(name, _)| name.as_str()).collect();
    let spreads = things.iter().flat_map(|(_, figures)| figures).flatten();
    let equal = unit.is_none().then_some(1.0);
    let values = spreads.flat_map(|s| [s.min, s.max]).chain(equal);
    rows(area, unit, &names, values, |at| {
        if equal.is_some() {
            let end = things.len() as f64;
            line(area, at(1.0, 0.0), at(1.0, end), BLACK.stroke_width(1))?;
        }
        for (row, (_, figures)) in things.iter().enumerate() {
            for (which, spread) in figures.iter().enumerate() {
                let Some(Spread { median, min, max }) = *spread else {
                    continue;
                };
                let y = row as f64 + (which as f64 + 1.0) / (figures.len() as f64 + 1.0);
                let style = colour(which);
                line(area, at(min, y), at(max, y), style.stroke_width(2))?;
                let dot = Circle::new(relative(area, at(median, y)), 4, style.filled());
                area.draw(&dot).map_err(text)?;
            }
        }
        Ok(())
    })
}

/// The names of the colours in a line; returns what is below it.
fn key<DB: DrawingBackend>(
    area: &Area<'_, DB>,
    legend: &[String],
) -> Result<DrawingArea<DB, Shift>, String> {
    let (top, rest) = area.split_vertically(30);
    let style = (font::NAME, TEXT).into_font().color(&BLACK);
    let each = top.dim_in_pixel().0 as i32 / legend.len().max(1) as i32;
    for (which, name) in legend.iter().enumerate() {
        let x = which as i32 * each + 12;
        let dot = Circle::new((x, 15), 4, colour(which).filled());
        top.draw(&dot).map_err(text)?;
        let style = style.pos(Pos::new(HPos::Left, VPos::Center));
        let name = Text::new(name.clone(), (x + 10, 15), style);
        top.draw(&name).map_err(text)?;
    }
    Ok(rest)
}

fn boxes<DB: DrawingBackend>(
    area: &Area<'_, DB>,
    unit: Unit,
    things: &[(String, Quantiles)],
) -> Outcome {
    let names: Vec<&str> = things.iter().map(|(name, _)| name.as_str()).collect();
    let values = things.iter().flat_map(|(_, q)| [q.p1, q.p99]);
    rows(area, Some(unit), &names, values, |at| {
        for (row, (_, q)) in things.iter().enumerate() {
            let y = |share: f64| row as f64 + share;
            let style = colour(row);
            let thin = style.stroke_width(2);
            for (from, to) in [(q.p1, q.p25), (q.p75, q.p99)] {
                line(area, at(from, y(0.5)), at(to, y(0.5)), thin)?;
            }
            for end in [q.p1, q.p99] {
                line(area, at(end, y(0.35)), at(end, y(0.65)), thin)?;
            }
            let corners = [(q.p25, 0.2), (q.p75, 0.8)];
            let corners = corners.map(|(x, share)| relative(area, at(x, y(share))));
            area.draw(&Rectangle::new(corners, style.mix(0.3).filled()))
                .map_err(text)?;
            area.draw(&Rectangle::new(corners, thin)).map_err(text)?;
            line(
                area,
                at(q.p50, y(0.2)),
                at(q.p50, y(0.8)),
                BLACK.stroke_width(2),
            )?;
        }
        Ok(())
    })
}

fn curves<DB: DrawingBackend>(
    area: &Area<'_, DB>,
    over: &Axis,
    unit: Unit,
    lines: &[(String, Vec<(f64, Spread)>)],
) -> Outcome {
    let names: Vec<String> = lines.iter().map(|(name, _)| name.clone()).collect();
    let area = &key(area, &names)?;
    let places = || lines.iter().flat_map(|(_, places)| places);
    let x = places().map(|(x, _)| *x);
    let y = places().flat_map(|(_, spread)| [spread.min, spread.max]);
    let mut builder = ChartBuilder::on(area);
    builder
        .margin(10)
        .margin_right(40)
        .set_label_area_size(LabelAreaPosition::Left, 90)
        .set_label_area_size(LabelAreaPosition::Bottom, 44);
    // Four types of chart, which only a macro can treat alike.
    macro_rules! chart {
        ($x:expr, $y:expr) => {{
            let mut chart = builder.build_cartesian_2d($x, $y).map_err(text)?;
            chart
                .configure_mesh()
                .x_desc(over.name.as_str())
                .x_labels(9)
                .x_label_formatter(&show(Some(over.unit)))
                .y_label_formatter(&show(Some(unit)))
                .label_style((font::NAME, TEXT))
                .light_line_style(WHITE)
                .axis_style(GREY)
                .draw()
                .map_err(text)?;
            for (which, (_, places)) in lines.iter().enumerate() {
                let style = colour(which);
                let medians = places.iter().map(|(x, spread)| (*x, spread.median));
                chart
                    .draw_series(LineSeries::new(medians.clone(), style.stroke_width(2)))
                    .map_err(text)?;
                chart
                    .draw_series(medians.map(|at| Circle::new(at, 3, style.filled())))
                    .map_err(text)?;
                let spreads = places.iter().map(|(x, spread)| {
                    let ends = [(*x, spread.min), (*x, spread.max)];
                    PathElement::new(ends, style.stroke_width(1))
                });
                chart.draw_series(spreads).map_err(text)?;
            }
        }};
    }
    let log_x = || {
        let all = x.clone().fold(f64::INFINITY, f64::min)..x.clone().fold(0.0, f64::max);
        (all.start / 1.2..all.end * 1.2).log_scale().base(2.0)
    };
    let log_y = || {
        let all = y.clone().fold(f64::INFINITY, f64::min)..y.clone().fold(0.0, f64::max);
        (all.start / 1.2..all.end * 1.2).log_scale()
    };
    match (wide(x.clone()), wide(y.clone())) {
        (true, true) => chart!(log_x(), log_y()),
        (true, false) => chart!(log_x(), range(y)),
        (false, true) => chart!(range(x), log_y()),
        (false, false) => chart!(range(x), range(y)),
    }
    Ok(())
}
