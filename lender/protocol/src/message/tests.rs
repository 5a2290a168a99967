use super::*;

#[test]
fn addresses_are_encoded_as_numbers() {
    let (iova, peer_address, len) = (0x1_2345_6000, 0x89_abcd_e000, 0x40_0000);
    let window = Request::OpenWindow {
        iova: Iova::new(iova),
        peer_address: PeerAddress::new(peer_address),
        len,
    };
    let bytes = postcard::to_stdvec(&window).unwrap();
    // The variant's number, then its fields.
    let numbers = (13u32, iova, peer_address, len);
    assert_eq!(bytes, postcard::to_stdvec(&numbers).unwrap());
}

/// The encoding has no field names: a field that is skipped when it has its default
/// would shift all later ones.
#[test]
fn limits_survive_the_encoding() {
    for alignment in [None, Some(4096)] {
        let limits = NtbLimits {
            alignment,
            ..NtbLimits::default()
        };
        let bytes = postcard::to_stdvec(&Reply::Limits(limits.clone())).unwrap();
        match postcard::from_bytes(&bytes) {
            Ok(Reply::Limits(received)) => assert_eq!(received, limits),
            other => panic!("{other:?}"),
        }
    }
}
