//! Routing traces: a .safetensors file with `topk_idx` [ranks, tokens, K] i32 (-1: none) and `topk_weight` f32.
//!
//! Before the data path, on the thread that sets a run up. The file is input from outside: opening it never waits,
//! every length is checked before memory is allocated for it, only the two tensors are read, and unusable values are
//! refused and quoted.
//!
//! The format: eight bytes of header length (little-endian), the header (a JSON object: name → dtype, shape,
//! data_offsets), then the data that the offsets count from.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;

use tokenyard::internals::base::{Error, Result, quoted};

/// The largest file, since every rank of a run holds its routing: 2^25 choices are 65536 tokens of 8 choices for each
/// of 64 ranks, the most ranks of a run.
const MAX_FILE_BYTES: u64 = 1 << 28;
/// The longest header. Two tensors take some 200 bytes and the rest is the file's metadata; the format itself allows
/// 100 MB, which take 1.6 GB once parsed.
const MAX_HEADER_BYTES: u64 = 1 << 20;
/// Bytes of a tensor that are read at once, whole elements.
const PIECE_BYTES: usize = 1 << 14;
/// Nesting in a header; the format needs 3.
const MAX_DEPTH: u32 = 16;

/// A trace in memory.
#[derive(Debug, Clone, PartialEq)]
pub struct TraceFile {
    ranks: usize,
    tokens: usize,
    top_k: usize,
    ids: Vec<i32>,
    weights: Vec<f32>,
    /// How many ranks of the run, at the most, read the same rank of the file.
    sharers: usize,
}

impl TraceFile {
    /// Reads a trace for a run of `run_ranks` ranks, and checks that it fits the run's experts and top-k.
    pub fn load(path: &str, run_ranks: usize, experts: usize, top_k: usize) -> Result<TraceFile> {
        read_trace(path, run_ranks, experts, top_k)
            .map_err(|advice| Error::argument("--routing", format!("`file:{}`", quoted(path.as_bytes())), advice))
    }

    /// Copies the routing of one token of a run.
    ///
    /// Rank r reads the file's rank r mod R, token t the file's token (start + t) mod T: the window moves on by
    /// `max_tokens` each iteration, and ranks that share a file rank start at different parts of the file.
    pub fn token(
        &self,
        iteration: u64,
        rank: usize,
        token: usize,
        max_tokens: usize,
        ids: &mut [i64],
        weights: &mut [f32],
    ) {
        let (file_rank, sharer) = (rank % self.ranks, rank / self.ranks);
        let moved = u128::from(iteration) * max_tokens as u128 % self.tokens as u128;
        let file_token = (moved as usize + sharer * self.tokens / self.sharers + token) % self.tokens;
        let start = (file_rank * self.tokens + file_token) * self.top_k;
        let entries = self.ids[start..start + self.top_k].iter().zip(&self.weights[start..]);
        for ((id, weight), (&file_id, &file_weight)) in ids.iter_mut().zip(weights).zip(entries) {
            (*id, *weight) = (i64::from(file_id), file_weight);
        }
    }
}

/// The end of a sentence: the problem and the advice.
type Refusal = String;

fn read_trace(path: &str, run_ranks: usize, experts: usize, top_k: usize) -> std::result::Result<TraceFile, Refusal> {
    let (mut file, header, data_start) = open(path)?;
    let ids = Tensor::find(&header, "topk_idx", "I32")?;
    let weights = Tensor::find(&header, "topk_weight", "F32")?;
    let [ranks, tokens, k] = ids.shape;
    if weights.shape != ids.shape {
        let (a, b) = (ids.shape, weights.shape);
        return Err(format!("topk_idx has shape {a:?} and topk_weight {b:?}; give them the same shape"));
    }
    if k != top_k {
        return Err(format!("its tokens choose {k} experts and the run's {top_k}; run with --top-k {k}"));
    }
    if ranks == 0 || tokens == 0 {
        return Err(format!("topk_idx has shape {:?}; give at least one rank and one token", ids.shape));
    }
    let ids = ids.read(&mut file, data_start, i32::from_le_bytes)?;
    let weights = weights.read(&mut file, data_start, f32::from_le_bytes)?;
    check_choices(&ids, &weights, [ranks, tokens, k], experts)?;
    Ok(TraceFile { ranks, tokens, top_k, ids, weights, sharers: run_ranks.div_ceil(ranks).max(1) })
}

/// Opens the file and reads its header; also returns the offset of the data.
fn open(path: &str) -> std::result::Result<(File, Json, u64), Refusal> {
    let unreadable = |e: std::io::Error| format!("it cannot be read ({e}); give the path of a .safetensors file");
    // Without waiting: opening a FIFO would wait for its writer.
    let mut file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(unreadable)?;
    let meta = file.metadata().map_err(unreadable)?;
    if !meta.is_file() {
        return Err("it is not a regular file; give the path of a .safetensors file".to_string());
    }
    let mut length = [0u8; 8];
    if meta.len() < 8 {
        return Err(format!("its {} bytes are too few for a .safetensors file; give another", meta.len()));
    }
    if meta.len() > MAX_FILE_BYTES {
        return Err(format!(
            "it has {} bytes, and at most {MAX_FILE_BYTES} are read; give a file of fewer tokens",
            meta.len()
        ));
    }
    file.read_exact(&mut length).map_err(unreadable)?;
    let length = u64::from_le_bytes(length);
    if length > meta.len() - 8 {
        return Err(format!(
            "its first eight bytes announce a header of {length} bytes in a file of {}; it is cut short or not a \
             .safetensors file: fetch or write it again",
            meta.len()
        ));
    }
    if length > MAX_HEADER_BYTES {
        return Err(format!(
            "its header has {length} bytes, and at most {MAX_HEADER_BYTES} are read; write it without metadata and other \
             tensors"
        ));
    }
    let mut text = vec![0u8; length as usize];
    file.read_exact(&mut text).map_err(unreadable)?;
    let header = Json::parse(&text)
        .ok_or_else(|| format!("its header of {length} bytes is not JSON; it is damaged or not a .safetensors file"))?;
    Ok((file, header, 8 + length))
}

fn check_choices(ids: &[i32], weights: &[f32], shape: [usize; 3], experts: usize) -> std::result::Result<(), Refusal> {
    let [_, tokens, k] = shape;
    for (row, chosen) in ids.chunks(k.max(1)).enumerate() {
        let (rank, token) = (row / tokens, row % tokens);
        for (i, &id) in chosen.iter().enumerate() {
            if id < -1 || usize::try_from(id).is_ok_and(|id| id >= experts) {
                return Err(format!(
                    "token {token} of rank {rank} goes to expert {id} and the run has {experts}; run with more \
                     --experts, or write -1 for none"
                ));
            }
            if id >= 0 && chosen[..i].contains(&id) {
                return Err(format!(
                    "token {token} of rank {rank} chooses expert {id} twice; make its choices distinct"
                ));
            }
        }
    }
    match weights.iter().position(|w| !w.is_finite()) {
        Some(at) => {
            let (row, weight) = (at / k.max(1), weights[at]);
            let (rank, token) = (row / tokens, row % tokens);
            Err(format!("a weight of token {token} of rank {rank} is {weight}; give finite weights"))
        }
        None => Ok(()),
    }
}

/// A tensor of three dimensions and four-byte elements, as the header describes it.
struct Tensor {
    name: &'static str,
    shape: [usize; 3],
    offsets: [u64; 2],
}

impl Tensor {
    fn find(header: &Json, name: &'static str, dtype: &str) -> std::result::Result<Tensor, Refusal> {
        let Some(entry) = header.get(name) else {
            return Err(format!("it has no tensor {name}; give topk_idx and topk_weight, each [ranks, tokens, K]"));
        };
        match entry.get("dtype") {
            Some(Json::Text(found)) if found == dtype => {}
            Some(Json::Text(found)) => {
                return Err(format!("its {name} is {}; write it as {dtype}", quoted(found.as_bytes())));
            }
            _ => return Err(format!("its {name} has no dtype; the header is damaged")),
        }
        let numbers = |key: &str| entry.get(key).and_then(Json::numbers);
        let (Some(shape), Some(offsets)) = (numbers("shape"), numbers("data_offsets")) else {
            return Err(format!("its {name} has no shape or no data_offsets; the header is damaged"));
        };
        let dimensions: Option<Vec<usize>> = shape.iter().map(|&d| usize::try_from(d).ok()).collect();
        let (Some(Ok(shape)), Ok(offsets)) = (dimensions.map(<[usize; 3]>::try_from), <[u64; 2]>::try_from(offsets))
        else {
            return Err(format!("its {name} has shape {shape:?}; three dimensions are needed: [ranks, tokens, K]"));
        };
        let bytes = shape.iter().try_fold(4usize, |product, &d| product.checked_mul(d));
        if bytes.is_none() || offsets[1].checked_sub(offsets[0]) != bytes.map(|b| b as u64) {
            return Err(format!("its {name} of shape {shape:?} lies at bytes {offsets:?}; the header is damaged"));
        }
        Ok(Tensor { name, shape, offsets })
    }

    fn read<T>(&self, file: &mut File, start: u64, of_bytes: fn([u8; 4]) -> T) -> std::result::Result<Vec<T>, Refusal> {
        let (name, length) = (self.name, file.metadata().map_or(0, |meta| meta.len().min(MAX_FILE_BYTES)));
        let range = self.offsets.map(|offset| offset.checked_add(start).filter(|&at| at <= length));
        let [Some(start), Some(end)] = range else {
            return Err(format!("its {name} ends beyond the file's {length} bytes; it is cut short: fetch it again"));
        };
        let unreadable = |e: std::io::Error| format!("its {name} cannot be read ({e}); fetch the file again");
        file.seek(SeekFrom::Start(start)).map_err(unreadable)?;
        // The range lies inside the file, so this is at most `MAX_FILE_BYTES`. Elements are read a piece at a time.
        let mut left = (end - start) as usize;
        let mut elements = Vec::with_capacity(left / 4);
        let mut piece = [0u8; PIECE_BYTES];
        while left > 0 {
            let piece = &mut piece[..left.min(PIECE_BYTES)];
            file.read_exact(piece).map_err(unreadable)?;
            elements.extend(piece.as_chunks::<4>().0.iter().map(|bytes| of_bytes(*bytes)));
            left -= piece.len();
        }
        Ok(elements)
    }
}

/// The part of JSON that a header needs. Numbers other than non-negative integers are kept as `Other`.
#[derive(Debug, PartialEq)]
enum Json {
    Text(String),
    Number(u64),
    List(Vec<Json>),
    Object(Vec<(String, Json)>),
    Other,
}

impl Json {
    /// The value, if the text is one JSON value and blanks.
    fn parse(text: &[u8]) -> Option<Json> {
        let mut parser = Parser { text, at: 0 };
        let value = parser.value(0)?;
        parser.blanks();
        (parser.at == text.len()).then_some(value)
    }

    fn get(&self, key: &str) -> Option<&Json> {
        match self {
            Json::Object(entries) => entries.iter().find(|(name, _)| name == key).map(|(_, value)| value),
            _ => None,
        }
    }

    fn numbers(&self) -> Option<Vec<u64>> {
        let Json::List(values) = self else { return None };
        values.iter().map(|v| if let Json::Number(n) = v { Some(*n) } else { None }).collect()
    }
}

struct Parser<'a> {
    text: &'a [u8],
    at: usize,
}

impl Parser<'_> {
    fn blanks(&mut self) {
        while matches!(self.text.get(self.at), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    /// Consumes `byte` if it is next, blanks skipped.
    fn take(&mut self, byte: u8) -> bool {
        self.blanks();
        let found = self.text.get(self.at) == Some(&byte);
        self.at += usize::from(found);
        found
    }

    fn value(&mut self, depth: u32) -> Option<Json> {
        if depth > MAX_DEPTH {
            return None;
        }
        self.blanks();
        match self.text.get(self.at)? {
            b'"' => self.string().map(Json::Text),
            b'{' => self
                .members(b'}', |p| {
                    p.blanks();
                    let name = p.string()?;
                    if p.take(b':') { Some((name, p.value(depth + 1)?)) } else { None }
                })
                .map(Json::Object),
            b'[' => self.members(b']', |p| p.value(depth + 1)).map(Json::List),
            _ => self.word(),
        }
    }

    /// Members between the bracket that is next and `close`, separated by commas.
    fn members<T>(&mut self, close: u8, mut member: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        self.at += 1;
        let mut members = Vec::new();
        if self.take(close) {
            return Some(members);
        }
        loop {
            members.push(member(self)?);
            if self.take(close) {
                return Some(members);
            }
            if !self.take(b',') {
                return None;
            }
        }
    }

    /// A number, or true, false, null.
    fn word(&mut self) -> Option<Json> {
        let rest = &self.text[self.at..];
        let letters = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'-' | b'.');
        let word = std::str::from_utf8(&rest[..rest.iter().take_while(|b| letters(b)).count()]).ok()?;
        self.at += word.len();
        match word {
            "true" | "false" | "null" => Some(Json::Other),
            _ if word.bytes().all(|b| b.is_ascii_digit()) => word.parse().ok().map(Json::Number),
            _ => word.parse::<f64>().ok().filter(|n| n.is_finite()).map(|_| Json::Other),
        }
    }

    fn string(&mut self) -> Option<String> {
        if self.text.get(self.at) != Some(&b'"') {
            return None;
        }
        self.at += 1;
        let mut bytes = Vec::new();
        loop {
            let byte = *self.text.get(self.at)?;
            self.at += 1;
            match byte {
                b'"' => return String::from_utf8(bytes).ok(),
                b'\\' => {
                    let mut utf8 = [0u8; 4];
                    bytes.extend_from_slice(self.escape()?.encode_utf8(&mut utf8).as_bytes());
                }
                _ => bytes.push(byte),
            }
        }
    }

    /// The character after a backslash. Halves of surrogate pairs become replacement characters: names that matter have
    /// none.
    fn escape(&mut self) -> Option<char> {
        let byte = *self.text.get(self.at)?;
        self.at += 1;
        match byte {
            b'"' | b'\\' | b'/' => Some(char::from(byte)),
            b'b' => Some('\u{8}'),
            b'f' => Some('\u{c}'),
            b'n' => Some('\n'),
            b'r' => Some('\r'),
            b't' => Some('\t'),
            b'u' => {
                let digits = std::str::from_utf8(self.text.get(self.at..self.at + 4)?).ok()?;
                self.at += 4;
                let code = u32::from_str_radix(digits, 16).ok()?;
                Some(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    const EXCERPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/text-256x8-excerpt.safetensors");

    /// A file of its own for each test, removed on drop.
    struct Temp(PathBuf);
    impl Temp {
        fn new(name: &str, bytes: &[u8]) -> Temp {
            let path = std::env::temp_dir().join(format!("tokenyard-trace-{}-{name}", std::process::id()));
            std::fs::write(&path, bytes).unwrap();
            Temp(path)
        }
        fn load(&self, ranks: usize, experts: usize, top_k: usize) -> Result<TraceFile> {
            TraceFile::load(self.0.to_str().unwrap(), ranks, experts, top_k)
        }
    }
    impl Drop for Temp {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    /// A trace of [2, 3, 2] in which every id is its position, plus a header's frame to damage.
    fn small(header: &str, ids: [i32; 12]) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        ids.iter().for_each(|id| bytes.extend_from_slice(&id.to_le_bytes()));
        (0..12).for_each(|w| bytes.extend_from_slice(&(w as f32 + 0.5).to_le_bytes()));
        bytes
    }

    const HEADER: &str = r#"{"__metadata__":{"a \"quoted\" \u00e9":"{[\\","n":"1"},
        "topk_idx":{"dtype":"I32","shape":[2,3,2],"data_offsets":[0,48]},
        "topk_weight":{"dtype":"F32","shape":[2,3,2],"data_offsets":[48,96]}}  "#;
    const IDS: [i32; 12] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, -1];

    #[test]
    fn window_moves_each_iteration_and_ranks_wrap_with_a_shift() {
        let file = Temp::new("window", &small(HEADER, IDS));
        let trace = file.load(4, 12, 2).unwrap();
        let at = |iteration, rank, token| {
            let (mut ids, mut weights) = ([0i64; 2], [0f32; 2]);
            trace.token(iteration, rank, token, 2, &mut ids, &mut weights);
            (ids, weights)
        };
        assert_eq!(at(0, 0, 0), ([0, 1], [0.5, 1.5]));
        assert_eq!(at(0, 1, 2), ([10, -1], [10.5, 11.5]));
        assert_eq!(at(1, 0, 0), ([4, 5], [4.5, 5.5]), "the second window starts two tokens later");
        assert_eq!(at(1, 0, 1), ([0, 1], [0.5, 1.5]), "and wraps");
        assert_eq!(at(0, 2, 0), ([2, 3], [2.5, 3.5]), "rank 2 is the file's rank 0, half a file later");
        assert_eq!(at(u64::MAX, 3, 0), at(u64::MAX % 3, 3, 0));
    }

    #[test]
    fn excerpt_of_the_text_trace_loads() {
        let trace = TraceFile::load(EXCERPT, 8, 256, 8).unwrap();
        assert_eq!((trace.ranks, trace.tokens, trace.top_k), (8, 128, 8));
        let sum: f32 = trace.weights[..8].iter().sum();
        assert!((sum - 1.0).abs() < 1e-5, "a token's weights sum to 1: {sum}");
        let refused = TraceFile::load(EXCERPT, 8, 64, 8).unwrap_err().to_string();
        assert!(refused.contains("the run has 64"), "{refused}");
        let refused = TraceFile::load(EXCERPT, 8, 256, 4).unwrap_err().to_string();
        assert!(refused.contains("--top-k 8"), "{refused}");
    }

    #[test]
    fn unusable_files_are_refused_with_their_values() {
        let bad_id = {
            let mut ids = IDS;
            ids[3] = -2;
            ids
        };
        let twice = {
            let mut ids = IDS;
            ids[3] = 2;
            ids
        };
        let long = {
            let mut b = small(HEADER, IDS);
            b[7] = 0x10;
            b
        };
        let nan = {
            let mut b = small(HEADER, IDS);
            let n = b.len();
            b[n - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
            b
        };
        let with = |from: &str, to: &str| small(&HEADER.replacen(from, to, 1), IDS);
        for (name, bytes, wanted) in [
            ("empty", Vec::new(), "0 bytes are too few"),
            ("text", b"this is a text and no tensor file".to_vec(), "announce a header of"),
            ("long", long, "announce a header of"),
            ("json", with("__metadata__\":", "__metadata__\""), "is not JSON"),
            ("missing", with("topk_idx", "topk_ids"), "no tensor topk_idx"),
            ("dtype", with("I32", "I64"), "topk_idx is I64"),
            ("dims", with("[2,3,2]", "[6,2]"), "three dimensions"),
            ("shape", with("[2,3,2]", "[2,3,3]"), "header is damaged"),
            ("huge", with("[2,3,2]", "[4294967296,4294967296,2]"), "header is damaged"),
            ("beyond", with("[48,96]", "[18446744073709551567,18446744073709551615]"), "ends beyond"),
            ("order", with("[48,96]", "[96,48]"), "header is damaged"),
            ("negative", with("[0,48]", "[-48,0]"), "data_offsets"),
            (
                "cut",
                {
                    let mut b = small(HEADER, IDS);
                    b.pop();
                    b
                },
                "topk_weight ends beyond",
            ),
            ("bad-id", small(HEADER, bad_id), "token 1 of rank 0 goes to expert -2"),
            ("twice", small(HEADER, twice), "chooses expert 2 twice"),
            ("nan", nan, "token 2 of rank 1 is NaN"),
        ] {
            let refused = Temp::new(name, &bytes).load(2, 12, 2).unwrap_err().to_string();
            assert!(refused.contains(wanted) && refused.contains("--routing is `file:"), "{name}: {refused}");
        }
        let refused = TraceFile::load("/no/such/file", 2, 12, 2).unwrap_err().to_string();
        assert!(refused.contains("cannot be read"), "{refused}");
        let refused = TraceFile::load("/", 2, 12, 2).unwrap_err().to_string();
        assert!(refused.contains("not a regular file"), "{refused}");
    }

    #[test]
    fn texts_of_a_header_and_names_of_files_are_shown_in_one_line() {
        let is_shown = |refused: &str, text: &str| {
            assert!(!refused.contains(char::is_control) && refused.contains(text), "{refused:?}");
        };
        // As the parser of the header reads the escapes, and as they stand there.
        for red in [r"\u001b[31m\u0007", "\x1b[31m\x07"] {
            let header = HEADER.replacen("I32", red, 1);
            let refused = Temp::new("red", &small(&header, IDS)).load(2, 12, 2).unwrap_err().to_string();
            is_shown(&refused, r"its topk_idx is \u{1b}[31m\u{7}; write it as I32");
        }
        let refused = Temp::new("red\x1b[31m\r\n", b"").load(2, 12, 2).unwrap_err().to_string();
        is_shown(&refused, r"red\u{1b}[31m\r\n`: its 0 bytes");
        let refused = TraceFile::load("/no\x1b\x07", 2, 12, 2).unwrap_err().to_string();
        is_shown(&refused, r"`file:/no\u{1b}\u{7}`: it cannot be read");
    }

    #[test]
    fn files_and_headers_are_read_up_to_their_limits() {
        let padded = |more: usize| {
            let blanks = MAX_HEADER_BYTES as usize - HEADER.len() + more;
            Temp::new("padded", &small(&format!("{HEADER}{}", " ".repeat(blanks)), IDS)).load(2, 12, 2)
        };
        assert!(padded(0).is_ok());
        assert!(padded(1).unwrap_err().to_string().contains("1048577 bytes, and at most 1048576"));
        let sparse = |bytes: u64| {
            let file = Temp::new("sparse", &small(HEADER, IDS));
            OpenOptions::new().write(true).open(&file.0).unwrap().set_len(bytes).unwrap();
            file.load(2, 12, 2)
        };
        assert!(sparse(MAX_FILE_BYTES).is_ok());
        assert!(sparse(MAX_FILE_BYTES + 1).unwrap_err().to_string().contains("268435457 bytes, and at most"));
    }

    #[test]
    fn damaged_files_never_panic() {
        let whole = small(HEADER, IDS);
        for cut in 0..whole.len() {
            assert!(Temp::new("cuts", &whole[..cut]).load(2, 12, 2).is_err(), "cut at {cut}");
        }
        for at in 0..8 + HEADER.len() {
            for value in [0u8, b'"', b'{', b']', b'9', b'\\', 0xff] {
                let mut damaged = whole.clone();
                damaged[at] = value;
                // Blanks and metadata may be damaged without harm.
                let _ = Temp::new("bytes", &damaged).load(2, 12, 2);
            }
        }
        let deep = vec![b'['; 100_000];
        assert_eq!(Json::parse(&deep), None);
    }
}
