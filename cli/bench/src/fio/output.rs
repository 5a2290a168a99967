//! fio's JSON.

use serde::Deserialize;

use crate::Error;

/// How much of malformed output an error quotes.
const QUOTE: usize = 400;

/// fio's results of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// Requests measured, the ramp's not among them.
    pub ios: u64,
    /// Requests a second.
    pub iops: f64,
    /// Bytes a second.
    pub bandwidth: f64,
    /// Latency from before submission to completion, nanoseconds.
    pub p50: f64,
    /// Latency from before submission to completion, nanoseconds.
    pub p99: f64,
    /// Latency from before submission to completion, nanoseconds.
    pub p999: f64,
}

#[derive(Deserialize)]
struct Document {
    jobs: [Job; 1],
}

/// A direction in which nothing went has zeros; with `unified_rw_reporting`
/// there is only `mixed`.
#[derive(Deserialize)]
struct Job {
    error: i32,
    read: Option<Direction>,
    write: Option<Direction>,
    mixed: Option<Direction>,
}

#[derive(Deserialize)]
struct Direction {
    total_ios: u64,
    iops: f64,
    bw_bytes: f64,
    lat_ns: Latency,
}

#[derive(Deserialize)]
struct Latency {
    percentile: Option<Percentiles>,
}

#[derive(Deserialize)]
struct Percentiles {
    #[serde(rename = "50.000000")]
    p50: f64,
    #[serde(rename = "99.000000")]
    p99: f64,
    #[serde(rename = "99.900000")]
    p999: f64,
}

/// Parses fio's output for one job, with other messages before and after it.
///
/// # Errors
/// When it is not fio's JSON, when fio reports an error, when it measured
/// nothing. The error quotes the output.
pub fn read_output(output: &str) -> Result<Outcome, Error> {
    let error = |what: String| Error::Fio {
        what,
        output: quote(output),
    };
    // Lines about its hooks come first, on the same stream.
    let json = output
        .find("{\n")
        .map(|start| &output[start..])
        .ok_or_else(|| error("printed no JSON".into()))?;
    let document = serde_json::Deserializer::from_str(json)
        .into_iter::<Document>()
        .next()
        .ok_or_else(|| error("printed no JSON".into()))?
        .map_err(|cause| error(format!("printed JSON that is not as expected ({cause})")))?;
    let [job] = document.jobs;
    if job.error != 0 {
        return Err(error(format!("reports error {}", job.error)));
    }
    let mut busy = [job.read, job.write, job.mixed]
        .into_iter()
        .flatten()
        .filter(|direction| direction.total_ios > 0);
    let direction = match (busy.next(), busy.next()) {
        (Some(direction), None) => direction,
        (None, _) => return Err(error("measured no I/O".into())),
        (Some(_), Some(_)) => return Err(error("reports reads and writes apart".into())),
    };
    let Some(Percentiles { p50, p99, p999 }) = direction.lat_ns.percentile else {
        return Err(error("reports no percentiles".into()));
    };
    Ok(Outcome {
        ios: direction.total_ios,
        iops: direction.iops,
        bandwidth: direction.bw_bytes,
        p50,
        p99,
        p999,
    })
}

/// The beginning of some output.
fn quote(output: &str) -> String {
    let output = output.trim();
    match output.char_indices().nth(QUOTE) {
        Some((end, _)) => format!("{}…", &output[..end]),
        None => output.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Made by fio 3.39 on a file in memory.
    const RANDREAD_IOS: u64 = 141_249;
    const RANDREAD_PERCENTILES: (f64, f64, f64) = (11_584.0, 59_648.0, 3_522_560.0);
    const RANDREAD: &str = include_str!("golden/randread.txt");
    const MIXED: &str = include_str!("golden/mixed.txt");
    const FAILED: &str = include_str!("golden/error.txt");

    fn error(output: &str) -> String {
        read_output(output).unwrap_err().to_string()
    }

    #[test]
    fn real_output_is_read_among_other_lines() {
        assert!(RANDREAD.starts_with("job : Saving output"));
        let outcome = read_output(RANDREAD).unwrap();
        assert_eq!(outcome.ios, RANDREAD_IOS);
        assert!((outcome.bandwidth / outcome.iops - 4096.0).abs() < 1.0);
        assert_eq!(
            (outcome.p50, outcome.p99, outcome.p999),
            RANDREAD_PERCENTILES
        );
    }

    #[test]
    fn a_mixed_job_is_read_as_one() {
        let outcome = read_output(MIXED).unwrap();
        assert_eq!(outcome.ios, 157_765);
        let percentiles = (outcome.p50, outcome.p99, outcome.p999);
        assert_eq!(percentiles, (11_584.0, 63_232.0, 2_867_200.0));
    }

    #[test]
    fn what_failed_is_an_error_that_quotes() {
        let message = error(FAILED);
        assert!(message.contains("error"), "{message}");
        assert!(message.contains("fio"), "{message}");
        let message = error("fio: no such device\n");
        assert!(
            message.contains("no JSON") && message.contains("no such device"),
            "{message}"
        );
    }

    #[test]
    fn what_is_not_as_expected_is_an_error() {
        let cut = &RANDREAD[..RANDREAD.len() / 2];
        assert!(
            error(cut).contains("not as expected (EOF"),
            "{}",
            error(cut)
        );
        let odd = RANDREAD.replace("\"total_ios\" :", "\"total_ios\" : -");
        assert!(error(&odd).contains("not as expected"), "{}", error(&odd));
        let other = RANDREAD.replace("99.900000", "99.990000");
        assert!(error(&other).contains("99.900000"), "{}", error(&other));
        let none = RANDREAD.replace("\"percentile\"", "\"p\"");
        assert!(error(&none).contains("no percentiles"));
    }

    #[test]
    fn a_run_that_measured_nothing_is_an_error() {
        let idle = RANDREAD.replace(
            &format!("\"total_ios\" : {RANDREAD_IOS}"),
            "\"total_ios\" : 0",
        );
        assert!(error(&idle).contains("no I/O"));
        let both = RANDREAD.replace("\"total_ios\" : 0", "\"total_ios\" : 5");
        assert!(error(&both).contains("apart"));
    }

    #[test]
    fn long_output_is_quoted_in_part() {
        let long = "é".repeat(1000);
        let message = error(&long);
        assert!(
            message.ends_with('…') && message.chars().count() < 600,
            "{message}"
        );
    }
}
