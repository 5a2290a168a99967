//! A connection of the control protocol becomes one that carries frames.

use std::{path::Path, sync::Arc, thread, time::Duration};

use farside_lender_protocol::{Address, Channel, Listener};
use farside_medium::{Frame, Link, LinkError, Memory};
use farside_pki::{
    Renewed, Side,
    issue::{self, Validity},
};
use rustix::event::{PollFd, PollFlags, poll};

const SOON: Duration = Duration::from_secs(20);

fn link(channel: Channel) -> Link {
    let (socket, secrets) = channel.into_link(SOON).unwrap();
    Link::new(socket, secrets.as_ref()).unwrap()
}

/// Both ends after messages in both directions, the last of the lender's.
fn ends(tls: bool) -> (Link, Link) {
    let site = tempfile::tempdir().unwrap();
    let pki = site.path().join("localhost");
    let listener = match tls {
        true => {
            let days = Validity::days(1);
            issue::init(site.path(), "test CA", days, false).unwrap();
            issue::issue(site.path(), "localhost", &[], days, &pki, true).unwrap();
            let certificates = Arc::new(Renewed::load(&pki, Side::Server).unwrap());
            Listener::bind_tcp("localhost", 0, Some(certificates)).unwrap()
        }
        false => Listener::bind_tcp("localhost", 0, None).unwrap(),
    };
    let address = match listener.address() {
        Address::Tls { port, .. } => format!("tls:localhost:{port}"),
        Address::Tcp { port, .. } => format!("tcp:localhost:{port}"),
        other => panic!("{other}"),
    };
    let lender = thread::spawn(move || {
        poll(&mut [PollFd::new(&listener, PollFlags::IN)], None).unwrap();
        let mut channel = listener.accept().unwrap().unwrap();
        for _ in 0..2 {
            let (number, _) = channel.receive::<u32>(SOON).unwrap();
            channel.send(&number, &[], SOON).unwrap();
        }
        link(channel)
    });
    let mut borrower = Channel::connect(&address.parse().unwrap(), Path::new(&pki), SOON).unwrap();
    for number in 0..2u32 {
        borrower.send(&number, &[], SOON).unwrap();
        assert_eq!(borrower.receive::<u32>(SOON).unwrap().0, number);
    }
    let borrower = link(borrower);
    (borrower, lender.join().unwrap())
}

fn receive(link: &mut Link) -> Result<Frame, LinkError> {
    loop {
        if let Some(frame) = link.receive(|_| Ok(Memory::NONE))? {
            return Ok(frame);
        }
        poll(&mut [PollFd::new(link, PollFlags::IN)], None).unwrap();
    }
}

#[test]
fn frames_follow_messages_with_tls_and_without() {
    for tls in [false, true] {
        let (mut borrower, mut lender) = ends(tls);
        for n in 0..40 {
            let read = Frame::Read {
                tag: n,
                offset: 8,
                len: 4096,
            };
            borrower.post(read, Memory::NONE);
            borrower.flush().unwrap();
            assert_eq!(receive(&mut lender).unwrap(), read);
            lender.post(Frame::Release { limit_ms: n.into() }, Memory::NONE);
            lender.flush().unwrap();
            assert_eq!(
                receive(&mut borrower).unwrap(),
                Frame::Release { limit_ms: n.into() }
            );
        }
        drop(lender);
        let error = receive(&mut borrower).unwrap_err();
        assert!(matches!(error, LinkError::Closed), "{error}");
    }
}

#[test]
fn a_channel_within_a_host_is_no_link() {
    let (channel, _other) = Channel::pair().unwrap();
    assert!(channel.into_link(SOON).is_err());
}
