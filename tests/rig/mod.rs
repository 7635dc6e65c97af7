//! One rank of a small world for tests of calls and errors: bf16 rows, top-2, experts that return what they get.
//!
//! Every weight is 0.5, so the sum over a token's two experts is the token's row again, exactly: a wrong, lost or
//! doubled row shows. `verify` and the reference check which expert computes what.

#![allow(dead_code)]

pub mod nodes;

use std::sync::Mutex;
use std::time::Duration;
use tokenyard::*;

pub const HIDDEN: usize = 64;
pub const EXPERTS: usize = 8;
pub const TOP_K: usize = 2;
pub const MAX_TOKENS: usize = 4;
pub const PATIENCE: Duration = Duration::from_secs(20);
const PITCH: usize = HIDDEN * 2;

pub struct Rig {
    pub ep: AllToAll,
    pub stream: Stream,
    pub rank: usize,
    pub idx: DeviceBuffer,
    pub x: DeviceBuffer,
    pub weight: DeviceBuffer,
    pub count: DeviceBuffer,
    pub rows: DeviceBuffer,
    pub expert_count: DeviceBuffer,
    pub out: DeviceBuffer,
    pub capacity: usize,
    /// Of a call whose other half was enqueued all the same; for `check`.
    pub early: Mutex<Option<Error>>,
}

/// The CPU device, or with TOKENYARD_TEST_DEVICE=cuda a GPU, which ranks share where there are fewer.
pub fn test_device(world: &World) -> Device {
    match std::env::var("TOKENYARD_TEST_DEVICE").as_deref() {
        Ok("cuda") => Device::cuda(world.rank().index() % Device::cuda_count().max(1)).unwrap(),
        _ => Device::cpu().unwrap(),
    }
}

pub fn builder(world: &World, device: &Device) -> AllToAllBuilder {
    AllToAll::builder(world)
        .device(device.clone())
        .hidden(HIDDEN)
        .experts(EXPERTS)
        .top_k(TOP_K)
        .max_tokens_per_rank(MAX_TOKENS)
        .sms(2)
        .timeout(Duration::from_secs(10))
}

impl Rig {
    pub fn new(world: &World) -> Rig {
        Rig::with(world, |builder| builder)
    }

    pub fn with(world: &World, change: impl Fn(AllToAllBuilder) -> AllToAllBuilder) -> Rig {
        Rig::on(world, test_device(world), change)
    }

    pub fn on(world: &World, device: Device, change: impl Fn(AllToAllBuilder) -> AllToAllBuilder) -> Rig {
        let ep = change(builder(world, &device)).build().unwrap();
        let capacity = world.size() * MAX_TOKENS * TOP_K;
        let alloc = |bytes: usize| device.alloc(bytes).unwrap();
        let rig = Rig {
            stream: device.new_stream().unwrap(),
            rank: world.rank().index(),
            idx: alloc(MAX_TOKENS * TOP_K * 4),
            x: alloc(MAX_TOKENS * PITCH),
            weight: alloc(MAX_TOKENS * TOP_K * 4),
            count: alloc(4),
            rows: alloc(capacity * PITCH),
            expert_count: alloc(EXPERTS * 4),
            out: alloc(MAX_TOKENS * PITCH),
            capacity,
            early: Mutex::default(),
            ep,
        };
        rig.weight.write(0, &0.5f32.to_ne_bytes().repeat(MAX_TOKENS * TOP_K)).unwrap();
        // Until `route`, no token names an expert: a choice that does not exist is reported by any later call.
        rig.idx.fill(0xFF).unwrap();
        // Allocating waits for whatever runs on a GPU, and a kernel of a rank that shares it may wait for this one.
        world.barrier("all rigs have their memory").unwrap();
        rig
    }

    /// Row of a token: the high bytes of floats between 1 and 2 that differ by rank, token, column and epoch.
    pub fn row(&self, token: usize, salt: usize) -> Vec<u8> {
        Rig::row_of(self.rank, token, salt)
    }

    /// The same of any rank.
    pub fn row_of(rank: usize, token: usize, salt: usize) -> Vec<u8> {
        (0..HIDDEN)
            .flat_map(|c| (0x3f80u16 + ((rank * 29 + token * 7 + c + salt * 13) % 128) as u16).to_ne_bytes())
            .collect()
    }

    /// Puts tokens with the given experts into the input.
    pub fn route(&self, choices: &[[i32; TOP_K]], salt: usize) {
        let idx: Vec<u8> = choices.iter().flatten().flat_map(|e| e.to_ne_bytes()).collect();
        self.idx.write(0, &idx).unwrap();
        for token in 0..choices.len() {
            self.x.write(token * PITCH, &self.row(token, salt)).unwrap();
        }
        self.out.fill(0xEE).unwrap();
    }

    pub fn tokens(&self, count: usize) -> Tokens {
        Tokens::new(self.x.view(), self.idx.view(), TokenCount::Host(count))
            .pitch_bytes(PITCH)
            .topk_weight(self.weight.view())
    }

    pub fn output(&self, capacity: usize) -> Output {
        Output::new(Layout::Contiguous { align: 1, capacity }, self.rows.view(), self.expert_count.view())
            .pitch_bytes(PITCH)
    }

    pub fn expert_rows(&self) -> Rows {
        Rows::new(self.rows.view()).pitch_bytes(PITCH)
    }

    pub fn combined(&self) -> Combined {
        Combined::new(self.out.view()).pitch_bytes(PITCH)
    }

    /// Enqueues a dispatch of the routed tokens, and their combine.
    pub fn enqueue(&self, tokens: &Tokens, capacity: usize) -> Result<Handle> {
        let handle = self.ep.dispatch(&self.stream, tokens, &self.output(capacity))?;
        let combine = || self.ep.combine(&self.stream, &handle, &self.expert_rows(), &self.combined());
        if let Err(error) = combine() {
            // On a busy machine the dispatch may have ended by now: combine returns its error in place of its work.
            if error.is_fatal() {
                return Err(error);
            }
            combine()?;
            *self.early.lock().unwrap() = Some(error);
        }
        Ok(handle)
    }

    /// What calls found.
    pub fn check(&self) -> Result<()> {
        self.early.lock().unwrap().take().map_or_else(|| self.ep.check(), Err)
    }

    /// Dispatch and combine of the routed tokens; waits; returns the result of `check`.
    pub fn round(&self, count: usize, capacity: usize) -> Result<()> {
        self.round_of(&self.tokens(count), capacity)
    }

    /// The same of these tokens.
    pub fn round_of(&self, tokens: &Tokens, capacity: usize) -> Result<()> {
        let _handle = self.enqueue(tokens, capacity)?;
        self.stream.synchronize(PATIENCE)?;
        self.check()
    }

    /// Puts in as many tokens as there may be, for the experts after this rank's, other ones in each round.
    pub fn route_all(&self, salt: usize) {
        let choices: Vec<[i32; TOP_K]> = (0..MAX_TOKENS)
            .map(|t| {
                let first = (self.rank + t * 3 + salt) % EXPERTS;
                [first as i32, ((first + 1 + t) % EXPERTS) as i32]
            })
            .collect();
        self.route(&choices, salt);
    }

    /// A whole correct round with results checked.
    pub fn good_round(&self, salt: usize) {
        self.route_all(salt);
        self.round(MAX_TOKENS, self.capacity).unwrap();
        self.expect_own_rows(MAX_TOKENS, salt);
    }

    /// Every token's sum must be its own row; nothing after the tokens may be written.
    pub fn expect_own_rows(&self, count: usize, salt: usize) {
        let mut seen = vec![0u8; MAX_TOKENS * PITCH];
        self.out.read(0, &mut seen).unwrap();
        for token in 0..MAX_TOKENS {
            let row = &seen[token * PITCH..][..PITCH];
            let wanted = if token < count { self.row(token, salt) } else { vec![0xEE; PITCH] };
            assert_eq!(row, wanted, "rank {} token {token}", self.rank);
        }
    }

    /// The sum of one token.
    pub fn sum(&self, token: usize) -> Vec<u8> {
        self.sums()[token * PITCH..][..PITCH].to_vec()
    }

    /// A token's row times a power of two, or 0.
    pub fn scaled_row(&self, token: usize, salt: usize, factor: f32) -> Vec<u8> {
        let row = self.row(token, salt);
        let (values, _) = row.as_chunks::<2>();
        let scale = |bits: &[u8; 2]| f32::from_bits(u32::from(u16::from_ne_bytes(*bits)) << 16) * factor;
        values.iter().flat_map(|bits| ((scale(bits).to_bits() >> 16) as u16).to_ne_bytes()).collect()
    }

    pub fn sums(&self) -> Vec<u8> {
        let mut seen = vec![0u8; MAX_TOKENS * PITCH];
        self.out.read(0, &mut seen).unwrap();
        seen
    }
}

/// A row's columns.
pub fn values(row: &[u8]) -> Vec<f32> {
    let (values, _) = row.as_chunks::<2>();
    values.iter().map(|bits| f32::from_bits(u32::from(u16::from_ne_bytes(*bits)) << 16)).collect()
}

/// A row times a factor, to bf16, to nearest even.
pub fn scaled(row: &[u8], factor: f32) -> Vec<f32> {
    let round = |value: f32| {
        let bits = value.to_bits();
        f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
    };
    values(row).into_iter().map(|value| round(value * factor)).collect()
}

/// Runs `rank_code` on a thread per rank of a world and waits for all.
pub fn on_ranks(ranks: usize, rank_code: impl Fn(World) + Sync) {
    std::thread::scope(|scope| {
        let threads: Vec<_> = World::threads(ranks)
            .unwrap()
            .into_iter()
            .map(|world| {
                let rank_code = &rank_code;
                scope.spawn(move || rank_code(world))
            })
            .collect();
        for thread in threads {
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        }
    });
}
