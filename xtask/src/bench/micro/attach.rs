//! The time to attach a device to a running backend and to detach it, through the backend's
//! control socket, as `farside attach` and `farside detach` do before and after QEMU's
//! part.

use std::{
    io::{BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};
use farside_backend_api::admin::{Answer, Command, Request, VERSION};
use farside_bench::Section;

use super::{
    figures::series,
    round_trip::micros,
    stage::{DEVICE, Stage, boot},
};
use crate::scene::SHORT;

/// Repetitions in a turn.
const TIMES: usize = 20;

/// Measures in turns.
pub(super) fn measure(program: &Path, turns: u32) -> Result<Section> {
    let mut stage = Stage::start(program)?;
    let socket = stage.serve("a", &[])?;
    let mut control = Control::connect(&socket.with_file_name("control"))?;
    let mut figures = Vec::new();
    for turn in 0..=turns {
        let medians = control.turn(&socket);
        let medians = medians.with_context(|| stage.last_words())?;
        if turn > 0 {
            figures.push(medians);
        }
    }
    let names = ["attach", "first connection and borrow", "detach"];
    let all = names.iter().enumerate();
    Ok(Section {
        name: "attach".into(),
        title: "Attaching and detaching".into(),
        about: format!(
            "Through the control socket of a running backend: attach (the lender is asked, the \
             device's socket made), the first client's connection and reset (which borrows the \
             device), and detach after that client has gone (answered when the lender has the \
             device back). Medians of {TIMES}, without what QEMU and the guest take for their \
             part."
        ),
        series: all
            .map(|(n, name)| series(*name, figures.iter().map(move |turn| turn[n])))
            .collect(),
    })
}

/// A connection to a control socket.
struct Control(BufReader<UnixStream>);

impl Control {
    fn connect(path: &Path) -> Result<Self> {
        let stream = UnixStream::connect(path);
        let stream = stream.with_context(|| format!("connecting to {}", path.display()))?;
        stream.set_read_timeout(Some(SHORT))?;
        Ok(Self(BufReader::new(stream)))
    }

    fn ask(&mut self, command: Command) -> Result<Answer> {
        let request = Request {
            version: VERSION,
            command,
        };
        let mut line = serde_json::to_vec(&request)?;
        line.push(b'\n');
        self.0.get_mut().write_all(&line)?;
        let mut answer = String::new();
        self.0.read_line(&mut answer).context("no answer")?;
        match serde_json::from_str(&answer)? {
            Answer::Refused(refusal) => bail!("the backend refuses: {refusal}"),
            answer => Ok(answer),
        }
    }

    /// Detaches, attaches and borrows the device. Medians, microseconds: attach, borrow,
    /// detach.
    fn turn(&mut self, socket: &Path) -> Result<[f64; 3]> {
        let device = || DEVICE.parse().expect("a valid id");
        let mut times = [const { Vec::new() }; 3];
        for _ in 0..TIMES {
            let start = Instant::now();
            // The backend may not have noticed yet that the client has disconnected.
            let force = true;
            let detach = Command::Detach {
                device: device(),
                force,
            };
            let answer = self.ask(detach)?;
            times[2].push(start.elapsed());
            ensure!(answer == Answer::Detached, "{answer:?}");

            let start = Instant::now();
            let answer = self.ask(Command::Attach { device: device() })?;
            times[0].push(start.elapsed());
            let attached = matches!(answer, Answer::Attached { already: false, .. });
            ensure!(attached, "{answer:?}");

            let start = Instant::now();
            let mut client = boot(socket)?;
            times[1].push(start.elapsed());
            client.close();
        }
        Ok(times.map(|mut times| {
            times.sort_unstable();
            micros(times[times.len() / 2])
        }))
    }
}
