//! Plots of every kind, as SVG and PNG, with ordinary and odd figures.

use super::*;
use crate::{Better, Environment, Point, Series, measurement::tests::job};

fn series(name: &str, unit: Unit, data: Data) -> Series {
    Series {
        name: name.into(),
        unit,
        better: Better::Less,
        data,
        against: None,
        target: None,
    }
}

fn points(places: &[(f64, f64)]) -> Data {
    let point = |(x, y): &(f64, f64)| Point {
        x: *x,
        y: vec![*y, y * 1.1],
    };
    Data::Points {
        over: Axis {
            name: "transfer size".into(),
            unit: Unit::Bytes,
        },
        points: places.iter().map(point).collect(),
    }
}

pub(crate) fn results() -> Results {
    let mut results = Results::new(Environment::default(), ["borrowed", "own"]);
    results.jobs.push(job("randread-4k-qd1", &[1.0, 1.2]));
    results.jobs.push(job("seqread-128k", &[0.5, 0.7]));
    let q = |scale: f64| Quantiles::of((1..1000).map(|n| f64::from(n) * scale)).unwrap();
    let series = vec![
        series("a & b", Unit::Nanoseconds, Data::Repeats(vec![1e3, 2e3])),
        series(
            "boxes",
            Unit::Nanoseconds,
            Data::Quantiles(vec![q(1.0), q(2.0)]),
        ),
        series("more", Unit::Nanoseconds, Data::Quantiles(vec![q(3.0)])),
        series(
            "wide",
            Unit::BytesPerSecond,
            points(&[(4096.0, 1e6), (1e8, 1e9)]),
        ),
        series("one", Unit::Nanoseconds, points(&[(4096.0, 1e6)])),
        series("bytes", Unit::Bytes, Data::Repeats(vec![7.0])),
        series("nothing", Unit::Count, Data::Repeats(vec![])),
        series("zero", Unit::Share, Data::Repeats(vec![0.0])),
    ];
    let section = Section {
        name: "all".into(),
        title: "All kinds".into(),
        about: "About <all>.".into(),
        series,
    };
    results.add(section).unwrap();
    results
}

fn names(plots: &[Plot]) -> Vec<&str> {
    plots.iter().map(|plot| plot.name.as_str()).collect()
}

#[test]
fn series_of_one_kind_and_unit_share_a_plot() {
    let plots = all(&results());
    let expected = [
        "fio-ratios",
        "all",
        "all-2",
        "all-3",
        "all-4",
        "all-5",
        "all-6",
        "all-7",
    ];
    assert_eq!(names(&plots), expected);
    let Kind::Boxes { rows, .. } = &plots[2].kind else {
        panic!("{:?}", plots[2]);
    };
    assert_eq!((rows[0].0.as_str(), rows[1].0.as_str()), ("boxes", "more"));
    // The median of both repeats.
    assert_eq!((rows[0].1.p50, rows[0].1.samples), (750.0, 1998));
}

#[test]
fn every_plot_becomes_svg_with_its_names() {
    for plot in all(&results()) {
        let svg = plot.svg().unwrap();
        assert!(
            svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"),
            "{}",
            plot.name
        );
        assert!(svg.contains(&plot.title), "{svg}");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }
    let svg = all(&results())[1].svg().unwrap();
    assert!(svg.contains("a &amp; b"), "{svg}");
}

#[test]
fn every_plot_becomes_png_with_text() {
    for plot in all(&results()) {
        let bytes = plot.png().unwrap();
        let mut reader = png::Decoder::new(std::io::Cursor::new(&bytes))
            .read_info()
            .unwrap();
        let mut pixels = vec![0; reader.output_buffer_size()];
        let info = reader.next_frame(&mut pixels).unwrap();
        assert_eq!((info.width, info.height), (WIDTH, plot.height()));
        // The title is in the first rows: dark pixels on white.
        let title = &pixels[..(WIDTH * 3 * 30) as usize];
        let dark = title.iter().filter(|byte| **byte < 100).count();
        assert!(dark > 100, "{}: {dark} dark bytes", plot.name);
    }
}
