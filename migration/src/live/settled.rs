//! A QEMU of which the transfer failed ends by itself, maybe while it is asked
//! something.

use std::time::{Duration, Instant};

use farside_vm_control::Error as Control;

use crate::Result;

/// How long QEMU may take to end.
const END: Duration = Duration::from_secs(20);

/// How often to ask again: until it has ended it may be reached, and hang up.
const ASK_AGAIN: Duration = Duration::from_millis(50);

/// Asks until QEMU has answered, or has ended and the answer says so.
pub(crate) fn settled<T>(mut ask: impl FnMut() -> std::result::Result<T, Control>) -> Result<T> {
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
            let answer = settled(|| {
                asked += 1;
                match asked {
                    3 => last.take().unwrap(),
                    _ => Err(Control::MonitorLost {
                        vm: "web1".into(),
                        why: "reset".into(),
                    }),
                }
            });
            (answer, asked)
        };
        assert_eq!(third_time(Ok(7)), (Ok(7), 3));
        let ended = Control::NotRunning {
            vm: "web1".into(),
            hint: String::new(),
        };
        let (answer, asked) = third_time(Err(ended));
        assert_eq!((answer.unwrap_err().kind, asked), (ErrorKind::Vm, 3));
    }
}
