//! The directory of farside's sockets.

use crate::{Facts, Finding, finding::quoted_path};

const CHECK: &str = "runtime";

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let runtime = &facts.runtime;
    let me = &facts.users.me;
    let path = runtime.path.display();
    let quoted = quoted_path(&runtime.path);
    let finding = match runtime.owner {
        None if runtime.writable => Finding::ok(
            CHECK,
            format!("{path} does not exist yet; it is created when needed"),
        ),
        None => Finding::problem(
            CHECK,
            format!("{path} does not exist, and user {} may not create it", me.name),
            "the sockets that QEMU connects to are created there; FARSIDE_RUNTIME_DIR names another place",
        )
        .fix(format!("install -d -m 0700 -o {} {quoted}", me.name)),
        Some(owner) if me.uid != 0 && owner != me.uid && owner != 0 => Finding::problem(
            CHECK,
            format!("{path} belongs to user {owner}, not to {}", me.name),
            "its owner could replace sockets in it: it is refused",
        )
        .fix(format!("rm -r {quoted}")),
        Some(_) if runtime.open => Finding::problem(
            CHECK,
            format!("every user may write to {path}"),
            "other users could replace sockets in it: it is refused",
        )
        .fix(format!("chmod o-w {quoted}")),
        Some(_) if !runtime.writable => Finding::problem(
            CHECK,
            format!("user {} may not write to {path}", me.name),
            "the sockets that QEMU connects to are created there",
        )
        .fix(format!(
            "chown {} {quoted} && chmod u+rwx {quoted}",
            me.name
        )),
        Some(_) => Finding::ok(CHECK, format!("{path} can be used")),
    };
    vec![finding]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Level, checks::tests::says};

    #[test]
    fn both_ways() {
        let mut facts = Facts::default();
        facts.runtime.path = "/run/user/1000/farside".into();
        facts.users.me.uid = 1000;
        facts.users.me.name = "ann".to_owned();
        let said = says(judge(&facts), Level::Problem, "ann may not create it");
        assert_eq!(
            said.fix,
            ["install -d -m 0700 -o ann /run/user/1000/farside"]
        );
        facts.runtime.writable = true;
        says(judge(&facts), Level::Ok, "does not exist yet");
        facts.runtime.writable = false;
        facts.runtime.owner = Some(1001);
        let said = says(judge(&facts), Level::Problem, "user 1001");
        assert_eq!(said.fix, ["rm -r /run/user/1000/farside"]);
        facts.runtime.owner = Some(1000);
        says(judge(&facts), Level::Problem, "may not write");
        facts.runtime.writable = true;
        says(judge(&facts), Level::Ok, "can be used");
        facts.runtime.open = true;
        let said = says(judge(&facts), Level::Problem, "every user may write");
        assert_eq!(said.fix, ["chmod o-w /run/user/1000/farside"]);
        facts.runtime.open = false;
        // Root serves in the directory of the units' user.
        facts.users.me.uid = 0;
        says(judge(&facts), Level::Ok, "can be used");
    }
}
