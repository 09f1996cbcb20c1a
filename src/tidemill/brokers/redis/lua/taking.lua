-- The second part of an exchange: how an owner is given jobs, of one line or of several.

-- Lease a job that was taken from its line; false when it had expired, and has ended. Its lane is seen to
-- here unless it is in a hand.
local function lend(j, token, envelope, lent, in_hand)
  if j.lane and not in_hand then Lanes.taken(j) end
  if j.expires > 0 and j.expires <= now then
    finish(j, EXPIRED, TOO_LATE)
    return false
  end
  local ttr = consumer and (j.ttr > 0 and j.ttr or 60) or 0
  j.state, j.token, j.leased, j.owner, j.deadline = RUNNING, token, now, owner, 0
  if consumer then
    j.deadline = now + math.floor(ttr * 1000000)
    add_due(j.deadline, 'l' .. j.id)
  end
  lent[#lent + 1] = text_of(token)
  lent[#lent + 1] = j.id
  save(j)
  show_lease(j, token, ttr, envelope)
  if j.lane and not in_hand then Lanes.start(j, token) end
  if flagged(j.flags, LINKED) then show_inputs(j.id) end
  return true
end

-- A server that came back without its last moments would draw again what it drew in them, and a late verdict of
-- then would fit a lease of now. Only that of the same owner: so it says how far it had come.
local function draw_tokens(many)
  local token = call('INCRBY', B .. ':seq', many) - many
  if token < told then
    call('INCRBY', B .. ':seq', told - token)
    token = told
  end
  if first_token == 0 then first_token = token + 1 end
  last_token = token + many
  return token
end

local mine, left_place = {}, false -- queues that are wanted by name; a place was left to others
for _, queue in ipairs(queues) do mine[queue] = true end

-- Take the first of a line as if it were all there is; true when it is leased, nil when there is none. One whose
-- place in its lane is left to others is added to `left`.
local function take_one(line, token, lent, left)
  local member = call('ZPOPMIN', B .. ':r:' .. line, 1)[1]
  if not member then return nil end
  local j = load_job(sub(member, 9))
  j.turn = number_in(member) -- where it stood
  if j.lane and #queues > 0 and Lanes.leave_place(j, mine, owner) then
    left[#left + 1] = {j.rank, member}
    left_place = true
    return false
  end
  local leased = lend(j, token, '', lent)
  if j.lane then Lanes.follow(j.lane) end
  flow()
  Limits.sync_lanes()
  flush_lines()
  return leased
end

local Hands = Lanes.Hands

local function open_run(line, many)
  local run = Hands.open(line, many)
  read_links_ahead(linked_of(run.ids))
  return run
end

-- Lease the first job of a run; false when more than its own lane may change with it: see `take_one`.
local function take_first(run, head, token, lent)
  local id, turn, name, cost = head.id, head.turn, nil, 0
  local data, hand = jobs[id], nil
  local bits = type(data) == 'string' and byte(data, 10) or -1
  if bits == Hands.LIMITED and not consumer then
    name, cost = Lanes.lane_of(data)
    hand = Hands.of(run, head, name)
    if not hand then return false end
    local _, _, _, attempt, losses, _, _, rank = unpk('>I8BBI4I4I4I4I4', data)
    jobs[id] = sub(data, 1, 8) .. IS_RUNNING .. sub(data, 10) .. pack('>I8I8I8I2c0', token, now, 0, #owner, owner)
    touch_id(id)
    lent[#lent + 1] = text_of(token)
    lent[#lent + 1] = id
    leases[#leases + 1] = pack('>I8I4I4I4I8dI8d', token, attempt + 1, losses, rank, turn, 0, now, 0)
    leases[#leases + 1] = ''
  else
    local j = load_job(id)
    if j.expires > 0 and j.expires <= now then return false end
    if j.lane then
      name, cost, hand = j.lane, j.cost, Hands.of(run, head, j.lane)
      if not hand then return false end
    end
    j.turn = turn
    lend(j, token, '', lent, true)
  end
  Hands.take(run, head, hand, name, cost, token)
  return true
end

-- Where lanes are: the next of a lane may come before what else is there.
local function take_in_turn(line, many)
  local token, lent, places, ids, empty, left = draw_tokens(many), {}, {}, {}, false, {}
  local size = many
  local run = open_run(line, size)
  while many > 0 do
    local head = Hands.first(run)
    local leased = head and take_first(run, head, token + 1, lent)
    local id = head and head.id
    if not leased then -- all that was read is taken, or this one goes by itself
      local over = not head and run.complete
      Hands.close(run)
      run = nil
      if over then
        call('ZREM', K_LINES, line)
        row_of(sub(line, 2)).listed = nil
        empty = true
        break
      end
      if head then leased = take_one(line, token + 1, lent, left) end
      size = math.min(many, head and 8 or 2 * size)
    end
    if leased then
      token, many = token + 1, many - 1
      places[#places + 1], ids[#ids + 1] = #leases, id
    end
    run = run or many > 0 and open_run(line, size)
  end
  if run then Hands.close(run) end
  if #left > 0 then Lanes.put_back(line, left) end
  for i, envelope in ipairs(fetch_all(K_ENV, ids)) do leases[places[i]] = envelope end
  count(sub(line, 2), 'running', #lent / 2)
  call_all('HSET', K_LEASES, lent)
  return empty
end

-- The hot path of leasing.
local function take_at_once(line, many)
  local key = B .. ':r:' .. line
  while many > 0 do
    local ready = call('ZPOPMIN', key, many)
    if #ready == 0 then
      call('ZREM', K_LINES, line)
      row_of(sub(line, 2)).listed = nil
      return true
    end
    local ids = {}
    for i = 1, #ready, 2 do ids[#ids + 1] = sub(ready[i], 9) end
    read_ahead(ids)
    read_links_ahead(linked_of(ids))
    local envelopes = fetch_all(K_ENV, ids)
    local token, lent = draw_tokens(#ids), {}
    for i, id in ipairs(ids) do
      local data = jobs[id]
      local bits = type(data) == 'string' and byte(data, 10)
      if (bits == 0 or bits == LINKED) and not consumer then -- neither times nor past: its record only grows
        local number, _, _, attempt, losses, _, _, rank = unpk('>I8BBI4I4I4I4I4', data)
        token, many = token + 1, many - 1
        jobs[id] = sub(data, 1, 8) .. IS_RUNNING .. sub(data, 10) .. pack('>I8I8I8I2c0', token, now, 0, #owner, owner)
        touch_id(id)
        lent[#lent + 1] = text_of(token)
        lent[#lent + 1] = id
        leases[#leases + 1] = pack('>I8I4I4I4I8dI8d', token, attempt + 1, losses, rank, number, 0, now, 0)
        leases[#leases + 1] = envelopes[i]
        if bits == LINKED then show_inputs(id) end
      elseif lend(load_job(id), token + 1, envelopes[i], lent) then
        token, many = token + 1, many - 1
      end
    end
    count(sub(line, 2), 'running', #lent / 2)
    call_all('HSET', K_LEASES, lent)
    flow()
    Limits.sync_lanes()
    flush_lines() -- an end may have made a successor ready
  end
  return false
end

-- Lease the first jobs of one line; true when it has no more, or its limit lets no more start.
local function take_line(line, many)
  local row, before = find_row(sub(line, 2)), #leases
  if row and row.gate then
    many = Gates.room(row, many)
    if many <= 0 then return true end
  end
  local in_turn = row and row.laned and call('EXISTS', B .. ':parked:' .. line) == 1
  local empty = (in_turn and take_in_turn or take_at_once)(line, many)
  if row and row.gate and #leases > before then Gates.take(row, (#leases - before) / 2) end
  return empty
end

-- Lease jobs that were brought back to an owner that takes no others; those under a limit, and suspects, are left to
-- who takes what is ready.
local function lend_aside(back)
  for _, entry in ipairs(back) do
    if #leases / 2 >= wanted then return end
    local j, lent = Unknown.take_out(entry[1]), {}
    if j then
      lend(j, draw_tokens(1) + 1, call('HGET', K_ENV, j.id), lent)
      count(j.queue, 'running', #lent / 2)
      call_all('HSET', K_LEASES, lent)
    end
  end
end

-- Of several lines, the one whose first job comes before those of the others.
local function best_line(lines)
  local best, best_rank, best_member
  for _, line in ipairs(lines) do
    local head = call('ZRANGE', B .. ':r:' .. line, 0, 0, 'WITHSCORES')
    if head[1] then
      local rank = tonumber(head[2])
      if not best or rank < best_rank or rank == best_rank and number_in(head[1]) < number_in(best_member) then
        best, best_rank, best_member = line, rank, head[1]
      end
    end
  end
  return best
end

-- Take from several lines as if they were one.
local function take_lines(lines, many)
  if #lines == 1 then return take_line(lines[1], many) end
  local full = #leases / 2 + many
  while #leases / 2 < full do
    local open = {}
    for _, line in ipairs(lines) do
      if Gates.is_open(sub(line, 2)) then open[#open + 1] = line end
    end
    local line, had = best_line(open), #leases
    if not line then return true end
    take_line(line, 1)
    if #leases == had and left_place then -- it stays as it is
      local others = {}
      for _, other in ipairs(lines) do
        if other ~= line then others[#others + 1] = other end
      end
      lines = others
    end
  end
  return false
end

-- Every queue its share, until the hand is full or nothing is left.
local function take_fairly(groups, many)
  while #groups > 0 and #leases / 2 < many do
    local share, rest = math.max(1, math.floor((many - #leases / 2) / #groups)), {}
    for _, group in ipairs(groups) do
      local few = math.min(share, many - #leases / 2)
      if few <= 0 then return end
      local before = #leases
      local empty = take_lines(group, few)
      if #leases > before then last_queue = sub(group[1], 2) end
      if not empty then rest[#rest + 1] = group end
    end
    groups = rest
  end
end

local function end_of(kind) return '(' .. string.char(byte(kind) + 1) end

local function lines_of(kind) return call('ZRANGEBYLEX', K_LINES, '[' .. kind, end_of(kind)) end

-- The first task that is to run alone, of the queues wanted; nearly always there is none.
local function take_lost()
  local lost = lines_of('L')
  if #lost == 0 then return end
  local lines, named = {}, {}
  for _, queue in ipairs(queues) do named[queue] = true end
  for _, line in ipairs(lost) do
    if #queues == 0 or named[sub(line, 2)] then lines[#lines + 1] = line end
  end
  if #lines > 0 then take_lines(lines, 1) end
end

-- By queue: its lines that may be served; those of the queues named, or all that have something.
local function wanted_lines(kinds)
  local groups = {}
  if #queues > 0 then
    for _, queue in ipairs(queues) do
      local row = find_row(queue)
      if row and not row.paused then
        local group = {}
        for _, kind in ipairs(kinds) do group[#group + 1] = kind .. queue end
        groups[#groups + 1] = group
      end
    end
    return groups
  end
  local by_queue, names = {}, {}
  for _, kind in ipairs(kinds) do
    for _, line in ipairs(lines_of(kind)) do
      local queue = sub(line, 2)
      if not by_queue[queue] then
        by_queue[queue] = {}
        names[#names + 1] = queue
      end
      table.insert(by_queue[queue], line)
    end
  end
  table.sort(names)
  for i, queue in ipairs(names) do groups[i] = by_queue[queue] end
  return groups
end

local function after_last(groups)
  local turned = {}
  for _, later in ipairs({true, false}) do
    for _, group in ipairs(groups) do
      if (sub(group[1], 2) > last_queue) == later then turned[#turned + 1] = group end
    end
  end
  return turned
end

-- Take fairly from the queues of a kind, those behind the last first, so many at a time: how many others there are
-- does not matter.
local function take_from_next(kind, many)
  local page, last, begun_anew = math.max(many, 64), last_queue, false
  local from, to = '(' .. kind .. last, end_of(kind)
  while from and #leases / 2 < many do
    local lines, groups = call('ZRANGEBYLEX', K_LINES, from, to, 'LIMIT', 0, page), {}
    if #lines < page and not begun_anew then
      from, to, begun_anew = '[' .. kind, '[' .. kind .. last, true
      for _, line in ipairs(call('ZRANGEBYLEX', K_LINES, from, to, 'LIMIT', 0, page - #lines)) do lines[#lines + 1] = line end
    end
    for i, line in ipairs(lines) do groups[i] = {line} end
    take_fairly(groups, many)
    from = #lines == page and '(' .. lines[page]
  end
end

local function flat(groups)
  local lines = {}
  for _, group in ipairs(groups) do
    for _, line in ipairs(group) do lines[#lines + 1] = line end
  end
  return lines
end
