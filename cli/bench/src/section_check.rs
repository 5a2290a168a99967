//! Validates a section, since results also come from files.

use crate::{Data, Error, Section, Series};

/// Each series has a unique name and figures that are numbers, and is set against one that is there
/// and has the same unit.
pub(crate) fn check(section: &Section) -> Result<(), Error> {
    let error = |what: String| {
        Err(Error::Section {
            section: section.name.clone(),
            what,
        })
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
    if section.name.is_empty() || !section.name.chars().all(plain) {
        return error("its name is to be of letters, digits, - and _: it names files".into());
    }
    for (at, series) in section.series.iter().enumerate() {
        let name = &series.name;
        if section.series[..at].iter().any(|other| other.name == *name) {
            return error(format!("two series are called {name}"));
        }
        if !finite(series) {
            return error(format!("series {name} has figures that are no numbers"));
        }
        let Some(against) = &series.against else {
            continue;
        };
        match section.series(against) {
            None => {
                return error(format!(
                    "series {name} is set against {against}: no such series"
                ));
            }
            Some(other) if other.unit != series.unit => {
                return error(format!(
                    "series {name} is set against {against}: another unit"
                ));
            }
            Some(_) => {}
        }
    }
    Ok(())
}

fn finite(series: &Series) -> bool {
    let figures = series.figures();
    let mut values = figures.iter().flat_map(|figure| &figure.repeats);
    let x_finite = match &series.data {
        Data::Points { points, .. } => points.iter().all(|point| point.x.is_finite()),
        Data::Repeats(_) | Data::Quantiles(_) => true,
    };
    x_finite && values.all(|value| value.is_finite())
}
