//! The one way between types and bytes: MessagePack with named fields, or JSON.
//!
//! `rmp-serde` alone would accept trailing bytes and offer a positional form
//! that breaks when a field is added; both are shut out here.

use serde::{
    Deserialize, Serialize,
    de::{DeserializeOwned, IgnoredAny},
};

/// How a message body is written. Named by the `Content-Type` header; a
/// command without the header is taken as MessagePack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Format {
    /// MessagePack with named fields: the form of every stored message.
    #[default]
    MessagePack,
    /// JSON, for commands and their answers.
    Json,
}

impl Format {
    /// The value of the `Content-Type` header.
    #[must_use]
    pub fn content_type(self) -> &'static str {
        match self {
            Self::MessagePack => "application/msgpack",
            Self::Json => "application/json",
        }
    }

    /// The format of a `Content-Type` header; parameters such as `charset`
    /// are ignored. `None` for a type that is not spoken here.
    #[must_use]
    pub fn of_content_type(header: &str) -> Option<Self> {
        let kind = header.split(';').next().unwrap_or("").trim();
        match kind.to_ascii_lowercase().as_str() {
            "application/msgpack" | "application/x-msgpack" | "application/vnd.msgpack" => Some(Self::MessagePack),
            "application/json" => Some(Self::Json),
            _ => None,
        }
    }
}

/// Why bytes are not the message that they should be.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The bytes do not decode; the text names the field where it can.
    #[error("decode {what}: {detail}")]
    Malformed {
        /// Name of the expected message.
        what: &'static str,
        /// What the decoder said.
        detail: String,
    },
    /// A whole message was read and bytes were left over.
    #[error("decode {what}: bytes after its end")]
    Trailing {
        /// Name of the expected message.
        what: &'static str,
    },
    /// The value cannot be written (a map key that is no string, for example).
    #[error("encode {what}: {detail}")]
    Unwritable {
        /// Name of the message.
        what: &'static str,
        /// What the encoder said.
        detail: String,
    },
}

/// Nesting deeper than this is refused: no message of the contract comes near.
pub const DEPTH_MAX: usize = 64;

fn name<T>() -> &'static str {
    let full = std::any::type_name::<T>();
    let head = full.split('<').next().unwrap_or(full);
    head.rsplit("::").next().unwrap_or(head)
}

/// Writes MessagePack with named fields.
///
/// # Errors
/// [`Error::Unwritable`] if the type has no MessagePack form; no type of this
/// crate is such a one.
pub fn to_msgpack<T: Serialize>(value: &T) -> Result<Vec<u8>, Error> {
    rmp_serde::to_vec_named(value).map_err(|error| Error::Unwritable { what: name::<T>(), detail: error.to_string() })
}

/// Reads exactly one MessagePack message.
///
/// # Errors
/// [`Error::Malformed`] and [`Error::Trailing`].
pub fn from_msgpack<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, Error> {
    let mut decoder = rmp_serde::Deserializer::from_read_ref(bytes);
    decoder.set_max_depth(DEPTH_MAX);
    let value = T::deserialize(&mut decoder)
        .map_err(|error| Error::Malformed { what: name::<T>(), detail: error.to_string() })?;
    // The decoder does not tell how far it came; that the next marker is
    // missing is the proof that the message was the whole.
    match IgnoredAny::deserialize(&mut decoder) {
        Err(rmp_serde::decode::Error::InvalidMarkerRead(error))
            if error.kind() == std::io::ErrorKind::UnexpectedEof =>
        {
            Ok(value)
        }
        _ => Err(Error::Trailing { what: name::<T>() }),
    }
}

/// Reads exactly one message in the given format.
///
/// # Errors
/// [`Error::Malformed`] and [`Error::Trailing`].
pub fn decode<T: DeserializeOwned>(format: Format, bytes: &[u8]) -> Result<T, Error> {
    match format {
        Format::MessagePack => from_msgpack(bytes),
        Format::Json => serde_json::from_slice(bytes)
            .map_err(|error| Error::Malformed { what: name::<T>(), detail: error.to_string() }),
    }
}

/// Writes one message in the given format.
///
/// # Errors
/// [`Error::Unwritable`].
pub fn encode<T: Serialize>(format: Format, value: &T) -> Result<Vec<u8>, Error> {
    match format {
        Format::MessagePack => to_msgpack(value),
        Format::Json => serde_json::to_vec(value)
            .map_err(|error| Error::Unwritable { what: name::<T>(), detail: error.to_string() }),
    }
}

/// Bytes that are binary in MessagePack and base64 text in JSON, where the
/// schema gives `contentEncoding`. For `#[serde(with = "...")]`.
pub mod blob {
    use base64::{Engine as _, engine::general_purpose::STANDARD};
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    /// Writes the bytes.
    ///
    /// # Errors
    /// What the serializer says.
    pub fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            serializer.serialize_str(&STANDARD.encode(bytes))
        } else {
            serializer.serialize_bytes(bytes)
        }
    }

    /// Reads the bytes.
    ///
    /// # Errors
    /// What the deserializer says, or that the text is no base64.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
        if deserializer.is_human_readable() {
            let text = String::deserialize(deserializer)?;
            STANDARD.decode(text).map_err(D::Error::custom)
        } else {
            serde_bytes::ByteBuf::deserialize(deserializer).map(serde_bytes::ByteBuf::into_vec)
        }
    }
}

/// The same for an optional field.
pub mod blob_option {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    struct Blob(#[serde(with = "super::blob")] Vec<u8>);

    /// Writes the bytes, or nothing.
    ///
    /// # Errors
    /// What the serializer says.
    pub fn serialize<S: Serializer>(bytes: &Option<Vec<u8>>, serializer: S) -> Result<S::Ok, S::Error> {
        match bytes {
            Some(bytes) => super::blob::serialize(bytes, serializer),
            None => serializer.serialize_none(),
        }
    }

    /// Reads the bytes, or nothing.
    ///
    /// # Errors
    /// What the deserializer says.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<u8>>, D::Error> {
        Ok(Option::<Blob>::deserialize(deserializer)?.map(|blob| blob.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Sample {
        number: u64,
        #[serde(with = "blob")]
        bytes: Vec<u8>,
        #[serde(default, skip_serializing_if = "Option::is_none", with = "blob_option")]
        more: Option<Vec<u8>>,
    }

    fn sample() -> Sample {
        Sample { number: 7, bytes: vec![0, 255, 1], more: Some(vec![9]) }
    }

    #[test]
    fn both_formats_give_the_value_back() {
        for format in [Format::MessagePack, Format::Json] {
            let bytes = encode(format, &sample()).unwrap();
            assert_eq!(decode::<Sample>(format, &bytes).unwrap(), sample(), "{format:?}");
        }
    }

    #[test]
    fn bytes_are_binary_in_messagepack_and_base64_in_json() {
        let packed = to_msgpack(&sample()).unwrap();
        assert!(packed.windows(5).any(|window| window == [0xc4, 3, 0, 255, 1]), "a MessagePack bin of three bytes");
        assert!(String::from_utf8(encode(Format::Json, &sample()).unwrap()).unwrap().contains(r#""bytes":"AP8B""#));
    }

    #[test]
    fn trailing_bytes_are_refused_in_both_formats() {
        for format in [Format::MessagePack, Format::Json] {
            let mut bytes = encode(format, &sample()).unwrap();
            bytes.push(b'1');
            assert!(decode::<Sample>(format, &bytes).is_err(), "{format:?}");
        }
    }

    #[test]
    fn a_huge_declared_length_is_an_error_and_no_allocation() {
        let bytes = [0x81, 0xa5, b'b', b'y', b't', b'e', b's', 0xc6, 0xff, 0xff, 0xff, 0xff];
        assert!(from_msgpack::<Sample>(&bytes).is_err());
    }

    #[test]
    fn nesting_beyond_the_limit_is_refused() {
        let deep = vec![0x91_u8; DEPTH_MAX * 4];
        assert!(from_msgpack::<crate::value::Value>(&deep).is_err());
    }

    #[test]
    fn content_types_are_matched_without_case_and_parameters() {
        assert_eq!(Format::of_content_type("Application/JSON; charset=utf-8"), Some(Format::Json));
        assert_eq!(Format::of_content_type("text/plain"), None);
    }
}
