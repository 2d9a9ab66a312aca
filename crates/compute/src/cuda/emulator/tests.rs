//! What the emulator lets pass and what it does not.

use std::sync::mpsc::channel;

use super::*;

const BYTES: usize = 64 * 4;

fn block(byte: u8) -> Arc<HostBytes> {
    let mut block = HostBytes::zeroed(BYTES);
    block.bytes_mut().fill(byte);
    Arc::new(block)
}

/// Waits until the event is reached, or says what failed.
fn reach(driver: &Emulator, event: &Event) -> Result<(), DriverError> {
    while !driver.query(event)? {
        std::thread::yield_now();
    }
    Ok(())
}

/// Two tiles of weights on their way through one buffer: in, multiplied, out, and the memory given back. Of the
/// events, `left_out` is not waited for.
fn visit(seed: u64, left_out: Option<usize>) -> Result<Vec<f32>, DriverError> {
    let driver = Emulator::new(2 * BYTES, seed);
    let [weights, result] = [(); 2].map(|()| driver.allocate(BYTES).unwrap());
    let wait = |at: usize, on: Stream, event: &Event| {
        if left_out != Some(at) {
            driver.wait(on, event);
        }
    };
    let (sender, receiver) = channel();
    let mut last = None;
    for round in 0..2u8 {
        let mut host = HostBytes::zeroed(BYTES);
        host.f32s_mut().fill(1.0 + f32::from(round));
        driver.copy_in(Stream::In, Arc::new(host), 0..BYTES, weights.span());
        wait(0, Stream::Compute, &driver.record(Stream::In));
        let (form, sizes, add) = (Form::Nt, [8, 8, 8], round > 0);
        let (a, b, c) = (weights.span(), weights.span(), result.span());
        let (operands, result_is) = (Element::F32, Element::F32);
        let product = Product { form, sizes, a, b, c, operands, result: result_is, add };
        driver.multiply(Stream::Compute, product);
        let computed = driver.record(Stream::Compute);
        wait(1, Stream::In, &computed);
        wait(2, Stream::Out, &computed);
        let sender = sender.clone();
        let done = Box::new(move |block: HostBytes| drop(sender.send(block)));
        driver.copy_out(Stream::Out, result.span(), HostBytes::zeroed(BYTES), done);
        let out = driver.record(Stream::Out);
        wait(3, Stream::Compute, &out);
        last = Some(out);
    }
    if left_out != Some(4) {
        last.map_or(Ok(()), |out| reach(&driver, &out))?;
    }
    let memory = [weights, result];
    memory.into_iter().for_each(|memory| driver.free(memory));
    reach(&driver, &driver.record(Stream::In))?;
    drop(sender);
    Ok(receiver.iter().flat_map(|block| block.f32s().to_vec()).collect())
}

#[test]
fn events_order_what_streams_do_and_none_can_be_left_out() {
    let want: Vec<f32> = [8.0, 8.0 + 32.0].into_iter().flat_map(|sum| [sum; 64]).collect();
    for seed in 0..50 {
        assert_eq!(visit(seed, None).unwrap(), want, "seed {seed}");
        for left_out in 0..5 {
            let failed = visit(seed, Some(left_out));
            assert!(matches!(failed, Err(DriverError::Misuse(_))), "{left_out}: {failed:?}");
        }
    }
}

/// A kernel and a product of bfloat16 values, as a layer chains them.
#[test]
fn kernels_and_products_follow_each_other_on_a_stream() {
    let driver = Emulator::new(1 << 20, 3);
    let (tokens, width) = (4, 32);
    let upload = |values: &[f32]| {
        let mut host = HostBytes::zeroed(values.len() * 4);
        host.f32s_mut().copy_from_slice(values);
        let memory = driver.allocate(host.len()).unwrap();
        driver.copy_in(Stream::Compute, Arc::new(host), 0..values.len() * 4, memory.span());
        memory
    };
    let x: Vec<f32> = (0..tokens * width).map(|i| (i % 7) as f32 - 3.0).collect();
    let w = vec![1.0; width];
    let (x_there, w_there) = (upload(&x), upload(&w));
    let h = driver.allocate(tokens * width * 2).unwrap();
    let rstd = driver.allocate(tokens * 4).unwrap();
    let arguments = vec![
        Arg::Read(x_there.span()),
        Arg::Read(w_there.span()),
        Arg::Float(0.0),
        Arg::Int(width as i32),
        Arg::Write(h.span()),
        Arg::Write(rstd.span()),
    ];
    let grid = Grid { blocks: [tokens as u32, 1, 1], threads: 32, shared_bytes: 128 };
    driver.launch(Stream::Compute, c"norm_bf16", grid, arguments);
    // Its first columns as a square: [4, 8] of what lies row by row.
    let c = driver.allocate(tokens * tokens * 4).unwrap();
    let (a, b, sizes) = (h.part(0..32 * 2), h.part(32 * 2..64 * 2), [4, 4, 8]);
    let (form, operands, result, add) = (Form::Nn, Element::Bf16, Element::F32, false);
    let product = Product { form, sizes, a, b, c: c.span(), operands, result, add };
    driver.multiply(Stream::Compute, product);
    let (sender, receiver) = channel();
    let done = Box::new(move |block: HostBytes| drop(sender.send(block)));
    driver.copy_out(Stream::Compute, c.span(), HostBytes::zeroed(64), done);
    reach(&driver, &driver.record(Stream::Compute)).unwrap();
    let got = receiver.recv().unwrap().f32s().to_vec();

    let normed = |at: usize| {
        let row = &x[at / width * width..][..width];
        let mean = row.iter().map(|x| x * x).sum::<f32>() / width as f32;
        model::from_bf16(model::to_bf16(x[at] / mean.sqrt()))
    };
    for (at, got) in got.iter().enumerate() {
        let (i, j) = (at / 4, at % 4);
        let want: f32 = (0..8).map(|k| normed(8 * i + k) * normed(32 + 4 * k + j)).sum();
        assert!((got - want).abs() < 1e-2, "{at}: {got} {want}");
    }
}

#[test]
fn misuse_is_told_and_ends_all_work() {
    let misuse = |what: &str, act: &dyn Fn(&Emulator)| {
        let driver = Emulator::new(10 * BYTES, 1);
        act(&driver);
        let end = driver.record(Stream::Compute);
        let failed = reach(&driver, &end);
        let said = failed.as_ref().err().map(ToString::to_string).unwrap_or_default();
        assert!(said.contains(what), "{what}: {failed:?}");
    };
    misuse("that was freed", &|driver| {
        let memory = driver.allocate(BYTES).unwrap();
        let span = memory.span();
        driver.free(memory);
        driver.fill(Stream::Compute, span, 0);
    });
    misuse("may still use", &|driver| {
        let memory = driver.allocate(BYTES).unwrap();
        driver.copy_in(Stream::In, block(1), 0..BYTES, memory.span());
        driver.free(memory);
    });
    misuse("beyond a block", &|driver| {
        let memory = driver.allocate(BYTES).unwrap();
        let (args, elements) = (vec![Arg::Write(memory.span())], 64 / 3 + 1);
        let grid = Grid { blocks: [1, 1, 1], threads: 32, shared_bytes: 0 };
        driver.launch(
            Stream::Compute,
            c"clear_stats",
            grid,
            args.into_iter().chain([Arg::Long(elements)]).collect(),
        );
        let end = driver.record(Stream::Compute);
        reach(driver, &end).unwrap();
        driver.free(memory);
    });
    misuse("lies in", &|driver| {
        let memory = driver.allocate(BYTES).unwrap();
        driver.fill(Stream::Compute, memory.span(), 0);
        let (a, b, c) = (memory.part(0..64), memory.part(0..64), memory.part(64..96));
        let (operands, result, sizes) = (Element::Bf16, Element::F32, [4, 4, 8]);
        let (form, add) = (Form::Tn, false);
        driver.multiply(Stream::Compute, Product { form, sizes, a, b, c, operands, result, add });
    });
    misuse("no kernel", &|driver| {
        let grid = Grid { blocks: [1, 1, 1], threads: 32, shared_bytes: 0 };
        driver.launch(
            Stream::Compute,
            c"nothing",
            grid,
            vec![Arg::Absent, Arg::Word(1), Arg::Float(1.0)],
        );
    });
}

#[test]
fn memory_is_counted_and_comes_back() {
    let driver = Emulator::new(2 * BYTES, 1);
    let memory = driver.allocate(2 * BYTES).unwrap();
    let refused = driver.allocate(1).unwrap_err();
    assert_eq!(refused, DriverError::Memory { wanted_bytes: 1, free_bytes: 0 });
    driver.free(memory);
    driver.free(driver.allocate(2 * BYTES).unwrap());
}
