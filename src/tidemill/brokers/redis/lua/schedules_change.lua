-- Change schedules and put their jobs. Each change succeeds or fails by itself; all are done in one
-- call.
--
-- ARGV  5 number of changes, then for each: name; packed: expected version (0 for none), due time, 1 to remove the
--       schedule, number of jobs, due time if all these jobs are left out; body; body if all these jobs are left
--       out, or '' for no difference; four arguments for each job (see put_accept.lua)
-- Returns for each change 0 when the version did not match, else {new version as text (0 when removed), a reason for
--       each job left out: 'id', 'key' or 'full'}; {'moved', where}; 'due' when `housekeeping` must move due jobs
--       before the next call.

-- Read the changes of a call, and all jobs and schedules that they touch.
local function read_changes()
  local changes, names, ids, at, drawn = {}, {}, {}, 6, 0
  for i = 1, tonumber(ARGV[5]) do
    local expect, due, gone, many, due_instead = unpk('>I8dBI4d', ARGV[at + 1])
    names[i] = ARGV[at]
    changes[i] = {
      expect = expect, due = due, gone = gone == 1, body = ARGV[at + 2], jobs = at + 4, many = many,
      due_instead = due_instead, body_instead = ARGV[at + 3],
    }
    for n = at + 4, at + 3 + 4 * many, 4 do ids[#ids + 1] = ARGV[n] end
    at = at + 4 + 4 * many
    drawn = drawn + 1 + many
  end
  seq = call('INCRBY', B .. ':seq', drawn) - drawn
  read_ahead(ids)
  local records = {} -- name → record, or false
  for i, record in ipairs(fetch_all(B .. ':schedule', names)) do records[names[i]] = record end
  -- touched: name → the packed version before this call, or ''; sooner: the earliest of the new due times
  return {changes = changes, names = names, records = records, touched = {}, sooner = nil}
end

-- Put a schedule's job, or return the reason to leave it out.
local function put_if_it_fits(id, record, envelope, wish)
  if load_job(id) then return 'id' end
  local queue, key = unpk('>Bc0Bc0', record, RECORD_RANK + 4)
  local held = key ~= '' and Unique.find(key)
  if held and byte(wish, 1) == Conflict.REJECT then return 'key' end
  local row = find_row(queue)
  if not held and row and row.max_size > 0 then
    flush_lines()
    if size_of(queue) >= row.max_size then return 'full' end
  end
  local how = put_one(id, record, envelope, wish)
  return (how == Placed.KEPT or how == Placed.MERGED) and 'key' or nil
end

-- Make one change: 0, or the new version and the reasons for jobs left out.
local function change(book, name, c)
  local records, touched = book.records, book.touched
  local version = records[name] and unpk('>I8', records[name]) or 0
  if version ~= c.expect then return 0 end
  touched[name] = touched[name] or records[name] and sub(records[name], 1, 8) or ''
  local left_out, why = {}, nil
  for i = c.jobs, c.jobs + 4 * c.many - 1, 4 do
    why = put_if_it_fits(ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3])
    if why then left_out[#left_out + 1] = why end
  end
  if c.body_instead ~= '' and #left_out == c.many then
    c.due, c.body, c.gone = c.due_instead, c.body_instead, false
  end
  if c.gone then
    records[name] = false
    return {'0', unpack(left_out)}
  end
  seq = seq + 1
  records[name] = pack('>I8d', seq, c.due) .. c.body
  if c.due > 0 then book.sooner = math.min(book.sooner or c.due, c.due) end
  return {text_of(seq), unpack(left_out)}
end

-- Write all schedules that changed.
local function write_changes(book)
  local set, listed, order, idle, gone = {}, {}, {}, {}, {}
  for name, before in pairs(book.touched) do
    local record, due = book.records[name], 0
    if record then
      due = select(2, unpk('>I8d', record))
      set[#set + 1], listed[#listed + 1] = name, '0'
      set[#set + 1], listed[#listed + 1] = record, name
    else
      gone[#gone + 1] = name
    end
    if due > 0 then
      order[#order + 1] = string.format('%.0f', due * 1000000)
      order[#order + 1] = sub(record, 1, 8) .. name
    end
    if before ~= '' then idle[#idle + 1] = before .. name end
  end
  call_all('HSET', B .. ':schedule', set)
  call_all('ZADD', B .. ':schedules', listed)
  call_all('HDEL', B .. ':schedule', gone)
  call_all('ZREM', B .. ':schedules', gone)
  call_all('ZREM', B .. ':firing', idle)
  call_all('ZREM', B .. ':claimed', idle)
  call_all('ZADD', B .. ':firing', order)
end

function Verbs.schedules_change()
  local again = cached_reply() or departure()
  if again then return again end
  if come_due() then -- an expired job must not keep another job out
    finish_step()
    return 'due'
  end
  flow()
  flush()
  local book, did = read_changes(), {}
  for i, c in ipairs(book.changes) do did[i] = change(book, book.names[i], c) end
  write_changes(book)
  finish_step()
  if book.sooner then fire_sooner(book.sooner * 1000000) end
  return cache_reply(did)
end

-- The same function for changes without jobs or new schedules: it also runs while the server is out of memory.
Verbs.schedules_drop = Verbs.schedules_change
