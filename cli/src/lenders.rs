//! What all lenders that this host knows answer.

use std::{collections::BTreeSet, panic::resume_unwind};

use farside_error_chain::Chain;
use farside_lender_protocol::{Address, CallError, Client, Instance, MAX_ASKED};
use farside_vm_config::LoadError;

use crate::args::Lenders;

/// A lender, and its answer.
pub(crate) type Answered<T> = (Address, Result<T, CallError>);

/// The answer of each lender. One that is known by several addresses answers once; of those that may have
/// ended only the answers are returned.
pub(crate) fn ask_all<T: Send>(
    lenders: &Lenders,
    ask: impl Fn(&Address, &mut Client) -> Result<T, CallError> + Sync,
) -> Result<Vec<Answered<T>>, LoadError> {
    let (now, before) = lenders.known()?;
    let answers = ask_each(&now, &ask).into_iter();
    let former = ask_each(&before, &ask).into_iter().filter(|(_, answer)| {
        let failed = answer.as_ref().err();
        if let Some(error) = failed {
            log::info!("{}", Chain(error));
        }
        failed.is_none()
    });
    let mut instances = BTreeSet::new();
    let answers = answers.chain(former).filter_map(|(address, answer)| {
        let answer = match answer {
            Ok((instance, _)) if !instances.insert(instance.to_string()) => return None,
            Ok((_, answer)) => Ok(answer),
            Err(error) => Err(error),
        };
        Some((address, answer))
    });
    Ok(answers.collect())
}

/// Asks some at a time, as one that does not answer takes its time.
fn ask_each<T: Send>(
    lenders: &[Address],
    ask: &(impl Fn(&Address, &mut Client) -> Result<T, CallError> + Sync),
) -> Vec<Answered<(Instance, T)>> {
    let ask = |lender: &Address| {
        let mut client = Client::connect(lender, None)?;
        let answer = ask(lender, &mut client)?;
        Ok((client.instance()?, answer))
    };
    let mut answers = Vec::new();
    for some in lenders.chunks(MAX_ASKED) {
        std::thread::scope(|scope| {
            let asked = some
                .iter()
                .map(|lender| (lender, scope.spawn(|| ask(lender))));
            // All are asked before the first answer is awaited.
            let asked: Vec<_> = asked.collect();
            for (lender, answer) in asked {
                let answer = answer.join().unwrap_or_else(|panic| resume_unwind(panic));
                answers.push((lender.clone(), answer));
            }
        });
    }
    answers
}
