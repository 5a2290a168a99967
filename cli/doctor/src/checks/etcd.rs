//! Whether etcd answers.

use crate::{Facts, Finding, finding::edit};

const CHECK: &str = "etcd";

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let Some(answer) = &facts.etcd else {
        return Vec::new();
    };
    vec![match answer {
        Ok(()) => Finding::ok(CHECK, "answers".to_owned()),
        Err(error) => Finding::problem(
            CHECK,
            error,
            "lenders that have started since it answered last are not found; devices of known ones can be borrowed",
        )
        .fix(edit(&farside_vm_config::places::host())),
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Level, checks::tests::says};

    #[test]
    fn both_ways() {
        let with = |etcd| {
            judge(&Facts {
                etcd,
                ..Facts::default()
            })
        };
        assert!(with(None).is_empty());
        says(with(Some(Ok(()))), Level::Ok, "answers");
        let error = "etcd does not answer at 3 of 3 endpoints".to_owned();
        let said = says(with(Some(Err(error))), Level::Problem, "3 of 3 endpoints");
        assert!(said.fix.concat().contains("host.toml"), "{said:?}");
    }
}
