//! Base64 as header values have it (RFC 4648, section 4): the standard alphabet, padded, nothing else.

/// `bytes` in base64.
pub(super) fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let byte = |index: usize| u32::from(chunk.get(index).copied().unwrap_or_default());
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for index in 0..4_usize {
            let sextet = (bits >> (18 - 6 * index)) & 0x3f;
            let character = if index > chunk.len() { b'=' } else { ALPHABET[sextet as usize] };
            text.push(char::from(character));
        }
    }
    text
}

/// What `text` stands for; `None` unless it is exactly what [`encode`] would write.
pub(super) fn decode(text: &[u8]) -> Option<Vec<u8>> {
    if !text.len().is_multiple_of(4) {
        return None;
    }
    let digits = text.strip_suffix(b"==").or_else(|| text.strip_suffix(b"=")).unwrap_or(text);
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    for chunk in digits.chunks(4) {
        let mut bits = 0_u32;
        for (index, digit) in chunk.iter().enumerate() {
            let sextet = ALPHABET.iter().position(|character| character == digit)?;
            bits |= u32::try_from(sextet).ok()? << (18 - 6 * index);
        }
        let [_, high, middle, low] = bits.to_be_bytes();
        let whole = chunk.len() * 6 / 8;
        let three = [high, middle, low];
        let (kept, dropped) = three.split_at(whole);
        // Bits that no byte is made of must be zero, or one text could be written in several ways.
        if whole == 0 || dropped.iter().any(|byte| *byte != 0) {
            return None;
        }
        bytes.extend_from_slice(kept);
    }
    (text.len() == digits.len().div_ceil(4) * 4).then_some(bytes)
}

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    #[test]
    fn e2_the_examples_of_the_specification() {
        for (text, encoded) in [
            ("Hello, \u{4e16}\u{754c}", "SGVsbG8sIOS4lueVjA=="),
            (" padded ", "IHBhZGRlZCA="),
            ("line1\nline2", "bGluZTEKbGluZTI="),
            ("=?base64?literal?=", "PT9iYXNlNjQ/bGl0ZXJhbD89"),
            ("", ""),
        ] {
            assert_eq!(encode(text.as_bytes()), encoded);
            assert_eq!(decode(encoded.as_bytes()).as_deref(), Some(text.as_bytes()));
        }
        for bad in ["A", "AA", "AAA", "A===", "AB==", "AAB=", "AA=A", "====", "AA ==", "AA\n=", "AAAA=", "AAAA===="] {
            assert_eq!(decode(bad.as_bytes()), None, "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn e2_what_is_encoded_reads_back_and_in_no_other_way(bytes in vec(any::<u8>(), 0..50), noise in "[A-Za-z0-9+/=]{0,12}") {
            let text = encode(&bytes);
            prop_assert_eq!(decode(text.as_bytes()), Some(bytes));
            if let Some(read) = decode(noise.as_bytes()) {
                prop_assert_eq!(encode(&read), noise);
            }
        }
    }
}
