//! Calls by way of the C interface allocate exactly as often as calls in Rust.

use crate::guard::allocations_during;
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::time::Duration;
use tokenyard::c::calls::{tokenyard_combined_t, tokenyard_output_t, tokenyard_rows_t, tokenyard_tokens_t};
use tokenyard::c::combine::tokenyard_combine;
use tokenyard::c::config::tokenyard_config_t;
use tokenyard::c::context::{tokenyard_context_check, tokenyard_context_create, tokenyard_context_destroy};
use tokenyard::c::device::{tokenyard_device_cpu, tokenyard_device_destroy};
use tokenyard::c::dispatch::tokenyard_dispatch;
use tokenyard::c::flight::{tokenyard_handle_create, tokenyard_handle_destroy};
use tokenyard::c::status::tokenyard_status_t;
use tokenyard::c::stream::{tokenyard_stream_create, tokenyard_stream_destroy, tokenyard_stream_synchronize};
use tokenyard::c::values::{TOKENYARD_LAYOUT_CONTIGUOUS, tokenyard_view_t};
use tokenyard::c::world::{tokenyard_world_destroy, tokenyard_world_threads};
use tokenyard::{AllToAll, Combined, Device, Layout, Output, Rows, TokenCount, Tokens, World};

const CALLS: usize = 40;
const OK: tokenyard_status_t = tokenyard_status_t::TOKENYARD_OK;

/// The fewest allocations and releases of a dispatch and of a combine: now and then a list grows.
#[derive(Debug, PartialEq)]
struct Fewest {
    dispatch: u64,
    combine: u64,
}

/// Memory of one rank with two tokens of eight bf16 columns, which are zeros and take expert 0.
#[repr(C, align(64))]
struct Memory {
    x: [u16; 16],
    rows: [u16; 16],
    out: [u16; 16],
    topk_idx: [i32; 2],
    topk_weight: [f32; 2],
    expert_count: [i32; 2],
}

fn fewest(mut dispatch: impl FnMut(), mut combine: impl FnMut(), mut wait: impl FnMut()) -> Fewest {
    let mut fewest = Fewest { dispatch: u64::MAX, combine: u64::MAX };
    for _ in 0..CALLS {
        fewest.dispatch = fewest.dispatch.min(allocations_during(&mut dispatch));
        fewest.combine = fewest.combine.min(allocations_during(&mut combine));
        wait();
    }
    fewest
}

fn in_rust() -> Fewest {
    let world = World::threads(1).unwrap().remove(0);
    let device = Device::cpu().unwrap();
    let stream = device.new_stream().unwrap();
    let builder = AllToAll::builder(&world).device(device.clone()).hidden(8).experts(2).top_k(1);
    let ep = builder.max_tokens_per_rank(2).sms(2).build().unwrap();
    let alloc = |bytes: usize| {
        let memory = device.alloc(bytes).unwrap();
        memory.fill(0).unwrap();
        memory
    };
    let (x, y, out, idx, weight, count) = (alloc(32), alloc(32), alloc(32), alloc(8), alloc(8), alloc(8));
    let layout = Layout::Contiguous { align: 1, capacity: 2 };
    let handle = std::cell::RefCell::new(None);
    fewest(
        || {
            let tokens = Tokens::new(x.view(), idx.view(), TokenCount::Host(2)).topk_weight(weight.view());
            let output = Output::new(layout, y.view(), count.view());
            *handle.borrow_mut() = Some(ep.dispatch(&stream, &tokens, &output).unwrap());
        },
        || {
            let (rows, combined) = (Rows::new(y.view()), Combined::new(out.view()));
            ep.combine(&stream, handle.borrow().as_ref().unwrap(), &rows, &combined).unwrap();
        },
        || {
            stream.synchronize(Duration::from_secs(60)).unwrap();
            ep.check().unwrap();
        },
    )
}

fn view<T>(memory: *mut T) -> tokenyard_view_t {
    tokenyard_view_t { pointer: memory.cast::<c_void>(), bytes: size_of::<T>() }
}

/// A struct of the C interface whose fields are 0.
fn zeroed<T: Copy>() -> T {
    // SAFETY: called for structs of numbers and pointers alone.
    unsafe { std::mem::zeroed() }
}

fn in_c() -> Fewest {
    let memory = Memory {
        x: [0; 16],
        rows: [0; 16],
        out: [0; 16],
        topk_idx: [0; 2],
        topk_weight: [0.0; 2],
        expert_count: [0; 2],
    };
    // The device writes it, so it is reached by its address alone.
    let memory = Box::into_raw(Box::new(memory));
    let (mut world, mut device, mut stream, mut context, mut handle) =
        (null_mut(), null_mut(), null_mut(), null_mut(), null_mut());
    // SAFETY: each function gets what its header says: objects of others, structs of their size, and memory that is
    // freed once the device is gone.
    unsafe {
        assert_eq!(tokenyard_world_threads(1, &raw mut world), OK);
        assert_eq!(tokenyard_device_cpu(&raw mut device), OK);
        assert_eq!(tokenyard_stream_create(device.as_ref(), &raw mut stream), OK);
        assert_eq!(tokenyard_handle_create(&raw mut handle), OK);
        let config = tokenyard_config_t {
            size: size_of::<tokenyard_config_t>() as u32,
            top_k: 1,
            device,
            hidden: 8,
            experts: 2,
            max_tokens_per_rank: 2,
            sms: 2,
            tuning: null(),
            ..zeroed()
        };
        assert_eq!(tokenyard_context_create(world.as_ref(), &raw const config, &raw mut context), OK);
        let mut tokens = tokenyard_tokens_t { size: size_of::<tokenyard_tokens_t>() as u32, count: 2, ..zeroed() };
        tokens.x = view(&raw mut (*memory).x);
        tokens.topk_idx = view(&raw mut (*memory).topk_idx);
        tokens.topk_weight = view(&raw mut (*memory).topk_weight);
        let mut output = tokenyard_output_t { size: size_of::<tokenyard_output_t>() as u32, ..zeroed() };
        (output.layout.kind, output.layout.capacity) = (TOKENYARD_LAYOUT_CONTIGUOUS, 2);
        output.rows = view(&raw mut (*memory).rows);
        output.expert_count = view(&raw mut (*memory).expert_count);
        let mut rows = tokenyard_rows_t { size: size_of::<tokenyard_rows_t>() as u32, ..zeroed() };
        rows.rows = output.rows;
        let mut combined = tokenyard_combined_t { size: size_of::<tokenyard_combined_t>() as u32, ..zeroed() };
        combined.out = view(&raw mut (*memory).out);
        let (here, queue, of) = (context.as_ref(), stream.as_ref(), handle.as_ref());
        let fewest = fewest(
            || assert_eq!(tokenyard_dispatch(here, queue, &raw const tokens, &raw const output, of), OK),
            || assert_eq!(tokenyard_combine(here, queue, of, &raw const rows, &raw const combined), OK),
            || {
                assert_eq!(tokenyard_stream_synchronize(queue, 60_000), OK);
                assert_eq!(tokenyard_context_check(here), OK);
            },
        );
        tokenyard_handle_destroy(handle);
        tokenyard_context_destroy(context);
        tokenyard_stream_destroy(stream);
        tokenyard_device_destroy(device);
        tokenyard_world_destroy(world);
        drop(Box::from_raw(memory));
        fewest
    }
}

#[test]
fn calls_by_c_allocate_as_often_as_calls_in_rust() {
    let rust = in_rust();
    assert!(rust.dispatch > 0, "what is allocated is counted: {rust:?}");
    assert_eq!(in_c(), rust);
}
