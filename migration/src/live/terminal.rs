//! A QEMU whose incoming transfer failed exits by itself, possibly during a QMP
//! command.

use std::time::{Duration, Instant};

use farside_vm_control::Error as Control;

use crate::Result;

/// Time limit for QEMU to exit.
const END: Duration = Duration::from_secs(20);

/// Pause between attempts: a QEMU that exits still accepts connections, and closes them.
const ASK_AGAIN: Duration = Duration::from_millis(50);

/// Repeats `ask` until its result is final: QEMU has answered, or has exited.
pub(crate) fn wait_until_terminal<T>(
    mut ask: impl FnMut() -> std::result::Result<T, Control>,
) -> Result<T> {
    let deadline = Instant::now() + END;
    loop {
        match ask() {
            Err(Control::MonitorLost { .. }) if Instant::now() < deadline => {
                std::thread::sleep(ASK_AGAIN);
            }
            answer => return Ok(answer?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    #[test]
    fn a_qemu_that_hangs_up_is_asked_again_and_one_that_answers_is_not() {
        let mut asked = 0;
        let mut third_time = |last: std::result::Result<u32, Control>| {
            asked = 0;
            let mut last = Some(last);
            let answer = wait_until_terminal(|| {
                asked += 1;
                match asked {
                    3 => last.take().unwrap(),
                    _ => Err(Control::MonitorLost {
                        vm: "web1".parse().unwrap(),
                        why: "reset".into(),
                    }),
                }
            });
            (answer, asked)
        };
        assert_eq!(third_time(Ok(7)), (Ok(7), 3));
        let ended = Control::NotRunning {
            vm: "web1".parse().unwrap(),
            hint: String::new(),
        };
        let (answer, asked) = third_time(Err(ended));
        assert_eq!((answer.unwrap_err().kind, asked), (ErrorKind::Vm, 3));
    }
}
