-- Move this store to another store, or tell how far a departed store was taken in here.
--
-- ARGV  5 verb
--       depart   6 mark for a store that has none yet, 7 where, 8 '1' to seal
--       stay
--       adopted  6 mark
-- Returns for depart {mark, where, last number drawn, sealed}, or {'moved', where} when the store moves elsewhere;
--       sealed is 0 while ends have to be counted down first: then the client calls again; for stay 0;
--       for adopted the cursor or ''.

function Verbs.transfer()
  local verb, K_DEPARTURE = ARGV[5], B .. ':departure'

  if verb == 'depart' then
    local known = call('HMGET', K_DEPARTURE, 'mark', 'where', 'sealed')
    if known[1] and known[2] ~= ARGV[7] then return {'moved', known[2]} end
    local mark, sealed = known[1] or ARGV[6], (known[3] == '1' or ARGV[8] == '1') and '1' or '0'
    if sealed == '1' and known[3] ~= '1' then -- all ends must be counted down before the seal
      flows.resumed = true
      finish_step()
      if flows_on() then sealed = '0' end
    end
    call('HSET', K_DEPARTURE, 'mark', mark, 'where', ARGV[7], 'sealed', sealed)
    for _, queue in ipairs(call('ZRANGE', B .. ':queues', 0, -1)) do call('HSET', B .. ':q:' .. queue, 'moved', 1) end
    hint_everybody()
    return {mark, ARGV[7], call('GET', B .. ':seq') or '0', sealed}
  end
  if verb == 'stay' then
    call('DEL', K_DEPARTURE)
    for _, queue in ipairs(call('ZRANGE', B .. ':queues', 0, -1)) do call('HDEL', B .. ':q:' .. queue, 'moved') end
    hint_everybody()
    return 0
  end
  return call('HGET', B .. ':from:' .. ARGV[6], 'cursor') or ''
end
