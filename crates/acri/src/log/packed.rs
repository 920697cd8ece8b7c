//! Log frames in the form in which they are stored.
//!
//! What harnesses write repeats itself: a build's output takes a tenth of the
//! room, and every copy that a server makes of a frame costs that much less. So
//! a frame of some size is stored as one LZ4 frame ([its format]) around its
//! MessagePack form, wherever that is smaller. The two need no mark: the first
//! byte of an LZ4 frame cannot begin a map of MessagePack. A small frame stays
//! as it is, so that an idle run's lines can be read off the stream with any
//! tool.
//!
//! [its format]: https://github.com/lz4/lz4/blob/dev/doc/lz4_Frame_format.md

use crate::{codec, limits};
use lz4_flex::frame::{BlockMode, BlockSize, FrameDecoder, FrameEncoder, FrameInfo};
use std::{
    borrow::Cow,
    cell::RefCell,
    io::{self, BufRead as _, Write as _},
};

/// Bytes below which a frame stays as it is.
pub const PACK_BYTES_MIN: usize = 1024;
/// Bytes of a frame before it was packed: more is refused.
pub const UNPACKED_BYTES_MAX: usize = limits::FRAME_MESSAGE_BYTES_MAX;

/// How an LZ4 frame begins.
const MAGIC: [u8; 4] = [0x04, 0x22, 0x4d, 0x18];
/// How its blocks end. A checksum may follow, if the byte after the magic number
/// has this bit.
const END_MARK: [u8; 4] = [0; 4];
const HAS_CHECKSUM: u8 = 0x04;
/// Room that is made for a frame at first, for each packed byte.
const ROOM_PER_BYTE: usize = 4;
const WHAT: &str = "LogFrame";

thread_local! {
    /// Its buffers are of the size of a frame, and fresh memory costs more than
    /// the work in it: each thread keeps one.
    static PACKER: RefCell<Option<FrameEncoder<Vec<u8>>>> = const { RefCell::new(None) };
}

/// The stored form of an encoded [`LogFrame`](super::LogFrame).
#[must_use]
pub fn pack(frame: Vec<u8>) -> Vec<u8> {
    if frame.len() < PACK_BYTES_MIN {
        return frame;
    }
    let packed = PACKER.with_borrow_mut(|kept| {
        // One that failed is not used again.
        let mut packer = kept.take().unwrap_or_else(packer);
        let packed = packed(&mut packer, &frame).ok()?;
        *kept = Some(packer);
        (packed.len() < frame.len()).then_some(packed)
    });
    packed.unwrap_or(frame)
}

fn packer() -> FrameEncoder<Vec<u8>> {
    let mut info = FrameInfo::new();
    info.block_size = BlockSize::Max256KB;
    info.block_mode = BlockMode::Independent;
    FrameEncoder::with_frame_info(info, Vec::new())
}

fn packed(packer: &mut FrameEncoder<Vec<u8>>, frame: &[u8]) -> io::Result<Vec<u8>> {
    packer.get_mut().clear();
    packer.write_all(frame)?;
    packer.try_finish()?;
    Ok(packer.get_ref().clone())
}

/// The encoded [`LogFrame`](super::LogFrame) of a stored form.
///
/// # Errors
/// [`codec::Error::Malformed`] if it is packed and damaged, cut off, or larger
/// than [`UNPACKED_BYTES_MAX`]; [`codec::Error::Trailing`] if something follows
/// it.
pub fn unpack(stored: &[u8]) -> Result<Cow<'_, [u8]>, codec::Error> {
    if !stored.starts_with(&MAGIC) {
        return Ok(Cow::Borrowed(stored));
    }
    let malformed = |detail: String| codec::Error::Malformed { what: WHAT, detail };
    let mut packed = FrameDecoder::new(stored);
    let mut frame = Vec::with_capacity(stored.len().saturating_mul(ROOM_PER_BYTE).min(UNPACKED_BYTES_MAX));
    loop {
        let block = packed.fill_buf().map_err(|error| malformed(format!("its packed form: {error}")))?;
        if block.is_empty() {
            break;
        }
        if frame.len() + block.len() > UNPACKED_BYTES_MAX {
            return Err(malformed(format!("more than {UNPACKED_BYTES_MAX} bytes in packed form")));
        }
        frame.extend_from_slice(block);
        let length = block.len();
        packed.consume(length);
    }
    if !packed.get_ref().is_empty() {
        return Err(codec::Error::Trailing { what: WHAT });
    }
    // The decoder takes an end between two blocks for the end.
    let blocks = match stored.get(MAGIC.len()) {
        Some(flags) if flags & HAS_CHECKSUM != 0 => stored.split_last_chunk::<4>().map_or(stored, |(blocks, _)| blocks),
        _ => stored,
    };
    if !blocks.ends_with(&END_MARK) {
        return Err(malformed("its packed form is cut off".to_owned()));
    }
    Ok(Cow::Owned(frame))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn build_output(bytes: usize) -> Vec<u8> {
        let mut frame = Vec::new();
        for line in 0_u32.. {
            if frame.len() >= bytes {
                break;
            }
            frame.extend_from_slice(format!("test suite::case_{line} ... ok in {} us\n", line * 37 % 911).as_bytes());
        }
        frame
    }

    /// Bytes that no packing makes smaller.
    fn noise(bytes: usize) -> Vec<u8> {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        (0..bytes)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state.to_be_bytes()[3]
            })
            .collect()
    }

    #[test]
    fn what_repeats_itself_is_stored_in_a_fraction_of_its_room() {
        let frame = build_output(512 * 1024);
        let stored = pack(frame.clone());
        assert!(stored.len() * 3 < frame.len(), "{} of {}", stored.len(), frame.len());
        assert_eq!(unpack(&stored).unwrap(), frame);
    }

    #[test]
    fn a_small_frame_and_one_that_packing_does_not_help_stay_as_they_are() {
        for frame in [Vec::new(), b"\x84\xa5agent".to_vec(), build_output(900), noise(300_000)] {
            assert_eq!(pack(frame.clone()), frame);
            assert!(matches!(unpack(&frame).unwrap(), Cow::Borrowed(same) if same == frame));
        }
    }

    #[test]
    fn the_largest_frame_is_packed_and_one_byte_more_is_refused() {
        let frame = vec![b'x'; UNPACKED_BYTES_MAX];
        assert_eq!(unpack(&pack(frame)).unwrap().len(), UNPACKED_BYTES_MAX);
        let error = unpack(&pack(vec![b'x'; UNPACKED_BYTES_MAX + 1])).unwrap_err().to_string();
        assert_eq!(error, "decode LogFrame: more than 1572864 bytes in packed form");
    }

    #[test]
    fn a_packed_frame_with_anything_behind_it_is_refused() {
        let stored = pack(build_output(4_000));
        for behind in [&b"x"[..], &[0; 4], &stored] {
            let error = unpack(&[&stored, behind].concat()).unwrap_err().to_string();
            assert_eq!(error, "decode LogFrame: bytes after its end");
        }
    }

    #[test]
    fn a_packed_frame_is_refused_wherever_it_was_cut_off() {
        let stored = pack(build_output(300_000));
        for length in (MAGIC.len()..stored.len()).step_by(97).chain([stored.len() - 4, stored.len() - 1]) {
            let error = unpack(&stored[..length]).unwrap_err().to_string();
            assert!(error.starts_with("decode LogFrame: its packed form"), "{length}: {error}");
        }
    }

    #[test]
    fn another_thread_and_the_next_frame_give_the_same_bytes() {
        let frame = || build_output(700_000);
        let first = pack(frame());
        drop(pack(noise(5_000)));
        assert_eq!(pack(frame()), first);
        assert_eq!(std::thread::spawn(move || pack(frame())).join().unwrap(), first);
    }

    #[test]
    fn a_frame_of_the_tool_lz4_is_read() {
        // Of a file with `lz4 -9 --content-size`, and of a pipe with `--no-frame-crc`.
        let sized = b"\x04\x22\x4d\x18\x6c\x40\xdc\x05\0\0\0\0\0\0\xe9\x14\0\0\0\x5facri \x05\0\xff\xff\xff\xff\xff\xc4\x50acri \0\0\0\0\x31\x4f\xe2\x6c";
        let plain = b"\x04\x22\x4d\x18\x60\x40\x82\x14\0\0\0\x5facri \x05\0\xff\xff\xff\xff\xff\xc4\x50acri \0\0\0\0";
        for stored in [&sized[..], plain] {
            assert_eq!(unpack(stored).unwrap().into_owned(), b"acri ".repeat(300));
        }
    }

    proptest! {
        #[test]
        fn what_was_packed_is_unpacked(seed in proptest::collection::vec(any::<u8>(), 0..64), times in 0_usize..200) {
            let frame = seed.repeat(times);
            prop_assume!(!frame.starts_with(&MAGIC));
            let stored = pack(frame.clone());
            prop_assert!(stored.len() <= frame.len());
            prop_assert_eq!(unpack(&stored).unwrap().into_owned(), frame);
        }

        #[test]
        fn a_damaged_packed_frame_is_an_error_or_other_bytes_and_never_a_panic(at in any::<usize>(), bit in 0..8_u8, cut in any::<usize>()) {
            let mut stored = pack(build_output(6_000));
            let at = at % stored.len();
            stored[at] ^= 1 << bit;
            stored.truncate(stored.len() - cut % stored.len());
            if let Ok(unpacked) = unpack(&stored) {
                prop_assert!(unpacked.len() <= UNPACKED_BYTES_MAX);
            }
        }
    }
}
