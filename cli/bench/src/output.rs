//! Results as files.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{Error, Results, plots, report};

/// Writes the results alone.
///
/// # Errors
/// When the file cannot be written.
pub fn write_json(results: &Results, path: &Path) -> Result<(), Error> {
    write(path, results.to_json().as_bytes())
}

/// Writes `results.json`, `report.html` and the plots as SVG and PNG to a
/// directory, made if missing. Returns the report's path.
///
/// # Errors
/// When something cannot be drawn or written.
pub fn write_all(results: &Results, directory: &Path) -> Result<PathBuf, Error> {
    fs::create_dir_all(directory).map_err(|error| Error::Write {
        path: directory.to_owned(),
        error,
    })?;
    // First the data that cannot be recreated.
    write_json(results, &directory.join("results.json"))?;
    let plots = plots::all(results);
    for plot in &plots {
        let file = |suffix| directory.join(format!("{}.{suffix}", plot.name));
        write(&file("svg"), plot.svg()?.as_bytes())?;
        write(&file("png"), &plot.png()?)?;
    }
    let path = directory.join("report.html");
    write(&path, report::html(results, &plots)?.as_bytes())?;
    Ok(path)
}

/// Reads a file of results.
///
/// # Errors
/// When there is none, when it is something else, or has another version.
pub fn read(path: &Path) -> Result<Results, Error> {
    let json = fs::read_to_string(path).map_err(|error| Error::Read {
        path: path.to_owned(),
        error,
    })?;
    Results::parse(&json).map_err(|error| Error::File {
        path: path.to_owned(),
        error: Box::new(error),
    })
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    fs::write(path, bytes).map_err(|error| Error::Write {
        path: path.to_owned(),
        error,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_has_results_plots_and_report() {
        let directory = tempfile::tempdir().unwrap();
        let out = directory.path().join("a/b");
        let results = crate::plots::tests::results();
        let report = write_all(&results, &out).unwrap();
        assert!(fs::read_to_string(report).unwrap().contains("</html>"));
        assert_eq!(read(&out.join("results.json")).unwrap(), results);
        for plot in ["fio-ratios.svg", "fio-ratios.png", "all.svg", "all-7.png"] {
            assert!(out.join(plot).metadata().unwrap().len() > 100, "{plot}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("results.json");
        assert!(
            read(&path)
                .unwrap_err()
                .to_string()
                .contains("results.json")
        );
        fs::write(&path, "no").unwrap();
        assert!(
            read(&path)
                .unwrap_err()
                .to_string()
                .contains("results.json")
        );
    }
}
